// The memory that experts lie in: the host's, or a GPU's. Copies are queued in order and done when finish() returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace verbatim::eplb {

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  // Lives as long as this object. Throws Failure.
  std::byte* allocate(std::size_t bytes) {
    allocated_ += bytes;
    return take(bytes);
  }
  // All that was allocated so far.
  std::size_t allocated() const { return allocated_; }

  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void upload(std::byte* to, const void* from, std::size_t bytes) = 0;    // from the host; returns when done
  virtual void download(void* to, const std::byte* from, std::size_t bytes) = 0;  // the same
  virtual void finish() = 0;

  virtual std::string describe() const = 0;
  // What the system says this process (or, on a GPU, everybody) had in use at most, or has in use.
  virtual std::size_t in_use() const = 0;

 private:
  virtual std::byte* take(std::size_t bytes) = 0;

  std::size_t allocated_ = 0;
};

std::unique_ptr<Memory> make_host_memory();

}  // namespace verbatim::eplb
