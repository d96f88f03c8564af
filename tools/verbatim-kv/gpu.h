// CUDA's driver and NCCL, as far as this tool calls them: opened at run time, so that it builds and starts where they
// are missing, and says so. Declarations restate their manuals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace verbatim::kv {

// Never closed: GPU libraries do not bear it.
class SharedLibrary {
 public:
  explicit SharedLibrary(const std::string& name);
  template <typename Function>
  void find(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(look_up(symbol));
  }

 private:
  void* look_up(const char* symbol) const;

  const std::string name_;
  void* const library_;
};

// One GPU's memory. Failures throw ranks::Failure.
class Gpu {
 public:
  using Address = unsigned long long;

  Gpu(const std::string& library, int rank);  // GPU `rank` modulo their number

  std::string describe() const { return name_; }
  Address allocate(std::size_t bytes);  // for as long as the process lives
  void* make_stream();
  // Queued on `stream`.
  void copy(Address to, Address from, std::size_t bytes, void* stream);
  // Done when they return.
  void upload(Address to, const void* from, std::size_t bytes);
  void download(void* to, Address from, std::size_t bytes);
  bool idle(void* stream) const;

 private:
  using Result = int;
  struct Functions {
    explicit Functions(const std::string& library);
    SharedLibrary from;
    Result (*init)(unsigned flags);
    Result (*count)(int* devices);
    Result (*get)(int* device, int ordinal);
    Result (*name)(char* name, int bytes, int device);
    Result (*retain)(void** context, int device);
    Result (*set_current)(void* context);
    Result (*allocate)(Address* data, std::size_t bytes);
    Result (*copy)(Address to, Address from, std::size_t bytes, void* stream);
    Result (*upload)(Address to, const void* from, std::size_t bytes);
    Result (*download)(void* to, Address from, std::size_t bytes);
    Result (*create_stream)(void** stream, unsigned flags);
    Result (*query)(void* stream);
    Result (*error_name)(Result error, const char** name);
  };
  void check(Result result, const char* what) const;

  const Functions cuda_;
  std::string name_;
};

// NCCL's point-to-point calls.
class Nccl {
 public:
  struct UniqueId {
    char internal[128];
  };
  using Comm = void*;

  explicit Nccl(const std::string& library);

  std::string version() const;
  UniqueId make_id() const;
  Comm init(int ranks, const UniqueId& id, int rank) const;
  void destroy(Comm comm) const;
  void group_start() const;
  void group_end() const;
  void send(Gpu::Address data, std::size_t bytes, int peer, Comm comm, void* stream) const;
  void recv(Gpu::Address data, std::size_t bytes, int peer, Comm comm, void* stream) const;
  // Throws when something went wrong since.
  void check_async(Comm comm) const;

 private:
  using Result = int;
  struct Functions {
    explicit Functions(const std::string& library);
    SharedLibrary from;
    Result (*version)(int* version);
    Result (*get_id)(UniqueId* id);
    Result (*init)(Comm* comm, int ranks, UniqueId id, int rank);
    Result (*destroy)(Comm comm);
    Result (*async_error)(Comm comm, Result* error);
    const char* (*error_string)(Result result);
    Result (*group_start)();
    Result (*group_end)();
    Result (*send)(const void* data, std::size_t count, int type, int peer, Comm comm, void* stream);
    Result (*recv)(void* data, std::size_t count, int type, int peer, Comm comm, void* stream);
  };
  void check(Result result, const char* what) const;

  const Functions nccl_;
};

}  // namespace verbatim::kv
