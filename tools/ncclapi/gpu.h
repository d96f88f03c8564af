// A GPU's memory and streams, through CUDA's driver library.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ncclapi/shared_library.h"

namespace verbatim::ncclapi {

// Addresses are the device's: nothing here may be dereferenced. Failures throw ranks::Failure.
class Gpu {
 public:
  using Stream = void*;  // a cudaStream_t, ordered with no other

  Gpu(const std::string& library, int rank);  // GPU `rank` modulo their number
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  std::string describe() const { return name_; }
  // Of all who use the GPU.
  std::size_t in_use() const;

  std::byte* allocate(std::size_t bytes);  // for as long as this lives
  Stream make_stream();                    // the same

  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream);
  // From and to the host, behind what is queued; done when they return.
  void upload(std::byte* to, const void* from, std::size_t bytes, Stream stream);
  void download(void* to, const std::byte* from, std::size_t bytes, Stream stream);
  void synchronize(Stream stream);
  // Whether all that was queued is done.
  bool idle(Stream stream) const;

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
    Result (*copy)(Pointer to, Pointer from, std::size_t bytes, Stream stream);
    Result (*upload)(Pointer to, const void* from, std::size_t bytes, Stream stream);
    Result (*download)(void* to, Pointer from, std::size_t bytes, Stream stream);
    Result (*create_stream)(Stream* stream, unsigned flags);
    Result (*destroy_stream)(Stream stream);
    Result (*synchronize)(Stream stream);
    Result (*query)(Stream stream);
    Result (*memory_info)(std::size_t* free, std::size_t* total);
    Result (*error_name)(Result error, const char** name);
  };

  void check(Result result, const char* what) const;

  const Functions cuda_;
  int device_ = 0;
  std::string name_;
  std::vector<Pointer> taken_;
  std::vector<Stream> streams_;
};

}  // namespace verbatim::ncclapi
