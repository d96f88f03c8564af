// A GPU's memory and one stream of it, through CUDA's driver library.
#pragma once

#include <cstddef>
#include <string>

#include "verbatim-eplb/memory.h"
#include "verbatim-eplb/shared_library.h"

namespace verbatim::eplb {

class CudaMemory final : public Memory {
 public:
  // Takes GPU `rank` modulo their number. Throws Failure.
  CudaMemory(const std::string& library, int rank);
  ~CudaMemory() override;

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override;
  void upload(std::byte* to, const void* from, std::size_t bytes) override;
  void download(void* to, const std::byte* from, std::size_t bytes) override;
  void finish() override;
  std::string describe() const override { return name_; }
  std::size_t in_use() const override;

  void* stream() const { return stream_; }  // a cudaStream_t
  // Whether all that was queued is done.
  bool idle() const;

 private:
  using Result = int;  // CUresult
  using Pointer = unsigned long long;

  // CUDA's driver interface as its manual states it; all of these have kept their form since CUDA 4.
  struct Functions {
    explicit Functions(const std::string& library);
    SharedLibrary from;
    Result (*init)(unsigned flags);
    Result (*count)(int* devices);
    Result (*get)(int* device, int ordinal);
    Result (*get_name)(char* name, int bytes, int device);
    Result (*retain)(void** context, int device);
    Result (*release)(int device);
    Result (*set_current)(void* context);
    Result (*allocate)(Pointer* data, std::size_t bytes);
    Result (*free)(Pointer data);
    Result (*copy)(Pointer to, Pointer from, std::size_t bytes, void* stream);
    Result (*upload)(Pointer to, const void* from, std::size_t bytes, void* stream);
    Result (*download)(void* to, Pointer from, std::size_t bytes, void* stream);
    Result (*create_stream)(void** stream, unsigned flags);
    Result (*synchronize)(void* stream);
    Result (*query)(void* stream);
    Result (*memory_info)(std::size_t* free, std::size_t* total);
    Result (*error_name)(Result error, const char** name);
  };

  std::byte* take(std::size_t bytes) override;
  void check(Result result, const char* what) const;

  const Functions cuda_;
  int device_ = 0;
  std::string name_;
  void* context_ = nullptr;
  void* stream_ = nullptr;
  std::vector<Pointer> taken_;
};

}  // namespace verbatim::eplb
