// Result<T>: how every fallible call of ours answers. An Error is a small value that travels up in silence; whoever
// decides that it is final logs it, once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace verbatim {

// Numbered like ncclResult_t (plugin/abi checks it), so that the data path hands one to NCCL as it is.
enum class ErrorKind : int {
  kNone = 0,
  kSystem = 2,    // a system or verbs call of this host failed; sys_errno says how
  kInternal = 3,  // a promise of ours is broken
  kArgument = 4,  // the caller passed something that the contract forbids
  kUsage = 5,     // a setting or a use that cannot work here
  kRemote = 6,    // the peer failed, went away, or the path to it did
};

// The steps of making a connection whose failures need advice of their own.
enum class SetupStep : std::uint8_t {
  kOther,
  kCreateQueue,  // ibv_create_qp, ibv_create_cq
  kModifyQp,     // ibv_modify_qp
  kWaitForPeer,  // the time for the peer's next message is over
};

struct Error {
  ErrorKind kind = ErrorKind::kInternal;
  int sys_errno = 0;           // errno of the failed call, 0 when there was none
  const char* operation = "";  // static name of what failed, e.g. "ibv_create_qp"
  bool logged = false;         // a line with more than this has been logged already
  SetupStep step = SetupStep::kOther;
};

// "ibv_create_qp: Cannot allocate memory", for messages.
std::string to_string(const Error& error);

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
