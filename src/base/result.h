// Result<T>: the return type of every call that can fail. An Error is a small value that callers pass upwards without
// logging it. The function that decides that the error is final logs it, once.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace verbatim {

// The numbers are those of ncclResult_t (plugin/abi.h checks this), so the plugin returns them to NCCL unchanged.
enum class ErrorKind : int {
  kNone = 0,
  kSystem = 2,    // a system call or verb failed on this host; see sys_errno
  kInternal = 3,  // a defect of the plugin
  kArgument = 4,  // the caller passed an argument that the interface forbids
  kUsage = 5,     // a setting or a call that cannot work on this host or in this state
  kRemote = 6,    // the peer or the network path to it failed, or the peer closed
};

// The steps of making a connection whose failures need advice of their own.
enum class SetupStep : std::uint8_t {
  kOther,
  kCreateQueue,  // ibv_create_qp, ibv_create_cq
  kModifyQp,     // ibv_modify_qp
  kMatchGids,    // comparing the GIDs of both ends
  kConnectTcp,   // connect(2)
  kWaitForPeer,  // the time for the peer's next message is over
};

struct Error {
  ErrorKind kind = ErrorKind::kInternal;
  int sys_errno = 0;           // errno of the failed call, 0 when there was none
  const char* operation = "";  // static name of what failed, e.g. "ibv_create_qp"
  bool logged = false;         // true: already logged with more detail than an Error has, so callers must not log it
  SetupStep step = SetupStep::kOther;
};

// "ibv_create_qp: Cannot allocate memory", for messages.
inline std::string to_string(const Error& error) {
  return error.operation + (error.sys_errno != 0 ? std::string(": ") + std::strerror(error.sys_errno) : "");
}

inline Error system_error(const char* operation, int sys_errno, SetupStep step = SetupStep::kOther) {
  return {ErrorKind::kSystem, sys_errno, operation, false, step};
}

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, error) {}

  explicit operator bool() const { return state_.index() == 0; }
  T& operator*() & { return std::get<0>(state_); }
  const T& operator*() const& { return std::get<0>(state_); }
  T&& operator*() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(error) {}

  explicit operator bool() const { return !error_.has_value(); }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace verbatim
