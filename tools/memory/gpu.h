// Memory and streams of a GPU, through CUDA's driver library, which is opened at run time.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "ranks/shared_library.h"

namespace verbatim::memory {

// Pointers are device addresses; the host must not dereference them. Failures throw ranks::Failure. One thread
// allocates and makes streams; all other functions may be called from several threads at once.
class Gpu {
 public:
  using Stream = void*;  // a cudaStream_t that is not ordered with any other stream

  Gpu(const std::string& library, int rank);  // selects GPU `rank` modulo the number of GPUs
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  std::string describe() const { return name_; }
  // Bytes of GPU memory that all processes together use.
  std::size_t in_use() const;

  std::byte* allocate(std::size_t bytes);  // freed by the destructor
  Stream make_stream();                    // destroyed by the destructor

  // Makes this GPU's context the calling thread's current one. All functions that need it do so themselves.
  void make_current() const;
  // Whether memory of this GPU can be exported as a dma-buf.
  bool exports_dmabufs() const;
  // `data` is at a page boundary, `bytes` are whole pages of one allocation.
  UniqueFd export_dmabuf(const std::byte* data, std::size_t bytes) const;

  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream);
  // Copies between host and GPU. They run after the operations queued in `stream`, and the call waits for the end.
  void upload(std::byte* to, const void* from, std::size_t bytes, Stream stream);
  void download(void* to, const std::byte* from, std::size_t bytes, Stream stream);
  void synchronize(Stream stream);
  // Whether all operations queued in `stream` have completed.
  bool idle(Stream stream) const;

 private:
  using Result = int;  // CUresult
  using Pointer = unsigned long long;

  // CUDA's driver interface as its manual defines it. These signatures have not changed since CUDA 4.
  struct Functions {
    explicit Functions(const std::string& library);
    ranks::SharedLibrary from;
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
    // Of CUDA 11.7; null in an older driver.
    Result (*attribute)(int* value, int attribute, int device);
    Result (*export_range)(void* handle, Pointer data, std::size_t bytes, int type, unsigned long long flags);
  };
  void check(Result result, const char* what) const;

  const Functions cuda_;
  int device_ = 0;
  void* context_ = nullptr;
  std::string name_;
  std::vector<Pointer> allocated_;
  std::vector<Stream> streams_;
};

}  // namespace verbatim::memory
