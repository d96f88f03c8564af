// A net plugin that corrupts the data that another plugin delivers. Tests use it to show that a check of bytes fails.
//
//   MUTATE_PLUGIN  path of the plugin that transfers the data; its tables are copied, with isend, irecv, test and
//                  closeRecv replaced
//   MUTATE_MODE    none             changes nothing (control run: the test that uses this plugin must pass)
//                  flip-byte        flips one bit of the byte in the middle of a received member
//                  swap-members     exchanges the data of two members of a grouped receive that have equal sizes
//                  skip-tail        restores the old contents of the last bytes of a received member
//                  overrun          changes the byte after a received member
//                  wrong-size       a receive reports one byte less than arrived (1 when 0 bytes arrived)
//                  wrong-send-size  a send reports one byte less than it sent (1 when it sent 0 bytes)
//                  error            test returns a remote error for a receive that is done
//                  late             flips one bit of a received member when the connection has been closed
//   MUTATE_NTH     which of the messages that the mode can change is changed, counted from 1 (default 1); only this
//                  one; late: one of each connection
//   MUTATE_ONLY    changes only what does not begin at a page boundary (unaligned), or has only zeros in its second
//                  half (zeros); default: any message
//
// Unless it is late, the change happens when `test` reports a request as done, in the memory that was passed to irecv.
// Messages are counted per process.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "nccl/net_v10.h"
#include "nccl/net_v11.h"
#include "nccl/net_v12.h"
#include "nccl/net_v6.h"
#include "nccl/net_v7.h"
#include "nccl/net_v8.h"
#include "nccl/net_v9.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT nccl::v6::Net ncclNetPlugin_v6;
EXPORT nccl::v7::Net ncclNetPlugin_v7;
EXPORT nccl::v8::Net ncclNetPlugin_v8;
EXPORT nccl::v9::Net ncclNetPlugin_v9;
EXPORT nccl::v10::Net ncclNetPlugin_v10;
EXPORT nccl::v11::Net ncclNetPlugin_v11;
EXPORT nccl::v12::Net ncclNetPlugin_v12;

nccl::v6::Net ncclNetPlugin_v6{};
nccl::v7::Net ncclNetPlugin_v7{};
nccl::v8::Net ncclNetPlugin_v8{};
nccl::v9::Net ncclNetPlugin_v9{};
nccl::v10::Net ncclNetPlugin_v10{};
nccl::v11::Net ncclNetPlugin_v11{};
nccl::v12::Net ncclNetPlugin_v12{};

namespace {

using nccl::Result;

constexpr std::size_t kTailBytes = 3;
constexpr std::uintptr_t kPageBytes = 4096;

enum class Mode {
  kNone,
  kFlipByte,
  kSwapMembers,
  kSkipTail,
  kOverrun,
  kWrongSize,
  kWrongSendSize,
  kError,
  kLate,
  kUnknown
};

Mode parse_mode(std::string_view name) {
  constexpr std::pair<std::string_view, Mode> kModes[] = {
      {"none", Mode::kNone},
      {"flip-byte", Mode::kFlipByte},
      {"swap-members", Mode::kSwapMembers},
      {"skip-tail", Mode::kSkipTail},
      {"overrun", Mode::kOverrun},
      {"wrong-size", Mode::kWrongSize},
      {"wrong-send-size", Mode::kWrongSendSize},
      {"error", Mode::kError},
      {"late", Mode::kLate},
  };
  for (const auto& [known, mode] : kModes) {
    if (name == known) return mode;
  }
  return Mode::kUnknown;
}

struct Member {
  unsigned char* data;
  std::vector<unsigned char> before;  // contents of the memory before the receive was posted (skip-tail only)
};

struct Pending {
  bool is_send;
  void* comm;
  std::vector<Member> members;
};

// The requests between post and completion, and which of them is changed. Different comms can be used by different
// threads at the same time, hence the mutex.
class Mutation {
 public:
  Mutation() {
    const char* const mode = std::getenv("MUTATE_MODE");
    const char* const nth = std::getenv("MUTATE_NTH");
    mode_ = mode == nullptr ? Mode::kUnknown : parse_mode(mode);
    if (nth != nullptr) countdown_ = std::strtoul(nth, nullptr, 10);
    if (const char* const only = std::getenv("MUTATE_ONLY")) only_ = only;
    const bool knows_only = only_.empty() || only_ == "unaligned" || only_ == "zeros";
    valid_ = mode_ != Mode::kUnknown && countdown_ > 0 && knows_only;
  }

  bool valid() const { return valid_; }

  void sent(void* request) {
    if (mode_ != Mode::kWrongSendSize) return;
    verbatim::MutexLock lock(mutex_);
    pending_[request] = {.is_send = true, .comm = nullptr, .members = {}};
  }

  // Describes a receive. Called before irecv, because the data may already be there when irecv returns.
  template <typename Size>
  Pending prepare_receive(void* comm, std::span<void* const> data, const Size* capacities) const {
    Pending pending{.is_send = false, .comm = comm, .members = {}};
    if (mode_ == Mode::kNone) return pending;
    for (std::size_t i = 0; i < data.size(); ++i) {
      auto* const bytes = static_cast<unsigned char*>(data[i]);
      Member member{.data = bytes, .before = {}};
      if (mode_ == Mode::kSkipTail) member.before.assign(bytes, bytes + capacities[i]);
      pending.members.push_back(std::move(member));
    }
    return pending;
  }

  void posted(void* request, Pending pending) {
    if (mode_ == Mode::kNone) return;
    verbatim::MutexLock lock(mutex_);
    pending_[request] = std::move(pending);
  }

  // What test returns.
  Result completed(void* request, int* sizes) {
    verbatim::MutexLock lock(mutex_);
    const auto found = pending_.find(request);
    if (found == pending_.end()) return Result::kSuccess;
    const bool is_due = countdown_ > 0 && can_corrupt(found->second, sizes) && --countdown_ == 0;
    if (is_due && mode_ == Mode::kLate) {
      late_[found->second.comm] = found->second.members[first_nonempty(found->second, sizes)].data;
      countdown_ = 1;  // the last message of the connection
    } else if (is_due) {
      corrupt(found->second, sizes);
    }
    pending_.erase(found);
    return is_due && mode_ == Mode::kError ? Result::kRemoteError : Result::kSuccess;
  }

  void closed(void* comm) {
    verbatim::MutexLock lock(mutex_);
    if (const auto found = late_.find(comm); found != late_.end()) *found->second ^= 0x10;
    late_.erase(comm);
  }

 private:
  using Pair = std::pair<std::size_t, std::size_t>;

  // Two members of equal size and different data; {0, 0} when there are none.
  static Pair exchangeable(const Pending& pending, const int* sizes) {
    for (std::size_t i = 0; i < pending.members.size(); ++i) {
      for (std::size_t j = i + 1; j < pending.members.size(); ++j) {
        if (sizes[i] > 0 && sizes[i] == sizes[j] &&
            std::memcmp(pending.members[i].data, pending.members[j].data, static_cast<std::size_t>(sizes[i])) != 0) {
          return {i, j};
        }
      }
    }
    return {0, 0};
  }

  static std::size_t first_nonempty(const Pending& pending, const int* sizes) {
    std::size_t i = 0;
    while (i < pending.members.size() && sizes[i] <= 0) ++i;
    return i;
  }

  // Whether MUTATE_ONLY allows to change the message.
  bool is_selected(const Pending& pending, const int* sizes) const {
    const std::size_t i = first_nonempty(pending, sizes);
    if (i == pending.members.size()) return false;
    const unsigned char* const data = pending.members[i].data;
    if (only_ == "unaligned") return reinterpret_cast<std::uintptr_t>(data) % kPageBytes != 0;
    return std::all_of(data + sizes[i] / 2, data + sizes[i], [](unsigned char byte) { return byte == 0; });
  }

  bool can_corrupt(const Pending& pending, const int* sizes) const {
    if (pending.is_send != (mode_ == Mode::kWrongSendSize)) return false;
    if (!only_.empty() && !is_selected(pending, sizes)) return false;
    if (mode_ == Mode::kWrongSize || mode_ == Mode::kWrongSendSize) return true;
    if (mode_ == Mode::kSwapMembers) return exchangeable(pending, sizes) != Pair{0, 0};
    return first_nonempty(pending, sizes) < pending.members.size();
  }

  void corrupt(Pending& pending, int* sizes) const {
    if (mode_ == Mode::kWrongSize || mode_ == Mode::kWrongSendSize) {
      sizes[0] += sizes[0] > 0 ? -1 : 1;
      return;
    }
    if (mode_ == Mode::kSwapMembers) {
      const auto [i, j] = exchangeable(pending, sizes);
      std::swap_ranges(pending.members[i].data, pending.members[i].data + sizes[i], pending.members[j].data);
      return;
    }
    const std::size_t i = first_nonempty(pending, sizes);
    Member& member = pending.members[i];
    const auto size = static_cast<std::size_t>(sizes[i]);
    if (mode_ == Mode::kFlipByte) {
      member.data[size / 2] ^= 0x10;
    } else if (mode_ == Mode::kOverrun) {
      member.data[size] ^= 0x10;
    } else if (mode_ == Mode::kSkipTail) {
      const std::size_t tail = std::min(size, kTailBytes);
      std::memcpy(member.data + size - tail, member.before.data() + size - tail, tail);
    }
  }

  Mode mode_ = Mode::kUnknown;
  std::string only_;
  bool valid_ = false;
  verbatim::Mutex mutex_;
  std::size_t countdown_ VERBATIM_GUARDED_BY(mutex_) = 1;
  std::unordered_map<void*, Pending> pending_ VERBATIM_GUARDED_BY(mutex_);
  std::unordered_map<void*, unsigned char*> late_ VERBATIM_GUARDED_BY(mutex_);  // by comm
};

Mutation& mutation() {
  static Mutation only;
  return only;
}

// The table of the wrapped plugin, one for each version.
template <typename Net>
Net inner{};

template <typename Net, typename Slot = decltype(Net::isend)>
struct Isend;
template <typename Net, typename... Arguments>
struct Isend<Net, Result (*)(Arguments...)> {
  static Result call(Arguments... arguments) {
    const Result result = inner<Net>.isend(arguments...);
    void* const request = *std::get<sizeof...(Arguments) - 1>(std::tuple(arguments...));
    if (result == Result::kSuccess && request != nullptr) mutation().sent(request);
    return result;
  }
};

template <typename Net, typename Slot = decltype(Net::irecv)>
struct Irecv;
template <typename Net, typename Size, typename... Rest>
struct Irecv<Net, Result (*)(void*, int, void**, Size*, int*, void**, Rest...)> {
  static Result call(void* comm, int n, void** data, Size* sizes, int* tags, void** mhandles, Rest... rest) {
    Pending pending = mutation().prepare_receive(comm, std::span(data, static_cast<std::size_t>(n)), sizes);
    const Result result = inner<Net>.irecv(comm, n, data, sizes, tags, mhandles, rest...);
    void* const request = *std::get<sizeof...(Rest) - 1>(std::tuple(rest...));
    if (result == Result::kSuccess && request != nullptr) mutation().posted(request, std::move(pending));
    return result;
  }
};

template <typename Net>
Result test_request(void* request, int* done, int* sizes) {
  constexpr std::size_t kMaxGroup = 64;  // size of NCCL's own arrays
  int local_sizes[kMaxGroup] = {};
  int* const reported = sizes != nullptr ? sizes : local_sizes;
  const Result result = inner<Net>.test(request, done, reported);
  return result == Result::kSuccess && *done != 0 ? mutation().completed(request, reported) : result;
}

template <typename Net>
Result close_recv(void* comm) {
  const Result result = inner<Net>.closeRecv(comm);
  mutation().closed(comm);
  return result;
}

template <typename Slot>
struct Reject;
template <typename... Arguments>
struct Reject<Result (*)(Arguments...)> {
  static Result call(Arguments... /*arguments*/) { return Result::kInvalidUsage; }
};

template <typename Net>
void wrap_table(void* library, const char* symbol, Net& table) {
  void* const found = library == nullptr ? nullptr : dlsym(library, symbol);
  if (found == nullptr || !mutation().valid()) {
    table.name = "Mutate";
    table.init = &Reject<decltype(Net::init)>::call;
    return;
  }
  inner<Net> = *static_cast<const Net*>(found);
  table = inner<Net>;
  table.isend = &Isend<Net>::call;
  table.irecv = &Irecv<Net>::call;
  table.test = &test_request<Net>;
  table.closeRecv = &close_recv<Net>;
}

void* library = nullptr;

__attribute__((constructor)) void load() {
  const char* const path = std::getenv("MUTATE_PLUGIN");
  if (path != nullptr) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::fprintf(stderr, "mutate: MUTATE_PLUGIN: %s\n", path == nullptr ? "not set" : dlerror());
  if (!mutation().valid()) std::fprintf(stderr, "mutate: MUTATE_MODE, MUTATE_NTH or MUTATE_ONLY has no known value\n");
  wrap_table(library, "ncclNetPlugin_v6", ncclNetPlugin_v6);
  wrap_table(library, "ncclNetPlugin_v7", ncclNetPlugin_v7);
  wrap_table(library, "ncclNetPlugin_v8", ncclNetPlugin_v8);
  wrap_table(library, "ncclNetPlugin_v9", ncclNetPlugin_v9);
  wrap_table(library, "ncclNetPlugin_v10", ncclNetPlugin_v10);
  wrap_table(library, "ncclNetPlugin_v11", ncclNetPlugin_v11);
  wrap_table(library, "ncclNetPlugin_v12", ncclNetPlugin_v12);
}

__attribute__((destructor)) void unload() {
  if (library != nullptr) dlclose(library);
}

}  // namespace
