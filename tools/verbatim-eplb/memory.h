// The memory that holds the experts: host memory or GPU memory. Copies run in order and are complete after finish().
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

  // The memory is freed by the destructor. Throws Failure.
  std::byte* allocate(std::size_t bytes) {
    allocated_ += bytes;
    return do_allocate(bytes);
  }
  // The sum of all allocations.
  std::size_t allocated() const { return allocated_; }

  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  virtual void upload(std::byte* to, const void* from, std::size_t bytes) = 0;    // from the host; waits for the end
  virtual void download(void* to, const std::byte* from, std::size_t bytes) = 0;  // to the host; waits for the end
  virtual void finish() = 0;

  virtual std::string describe() const = 0;
  // Host memory: the process's peak resident set. GPU memory: the bytes that all processes use now.
  virtual std::size_t in_use() const = 0;

 private:
  virtual std::byte* do_allocate(std::size_t bytes) = 0;

  std::size_t allocated_ = 0;
};

std::unique_ptr<Memory> make_host_memory();

}  // namespace verbatim::eplb
