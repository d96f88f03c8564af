// Copies and memsets. Each begins after a random time, and a large copy is written in pieces in random order with
// pauses between them: who does not wait for its end finds old bytes.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "support/cuda/memory.h"
#include "support/cuda/streams.h"

namespace standin {
namespace {

constexpr std::size_t kPiece = 8192;  // a copy of at most so many bytes is written at once
constexpr std::size_t kMaxPieces = 8;
constexpr std::size_t kLine = 128;  // pieces begin at lines: the engines do not tear them
constexpr std::size_t kBounceBytes = 4096;

// One side of a copy: device memory, or host memory with `host`.
struct Place {
  CUdeviceptr address = 0;
  std::byte* host = nullptr;
};

// Device memory is not the CPU's: programs on a GPU may race on it without an error, so sanitizers must not watch it.
__attribute__((no_sanitize("thread", "address"))) void device_copy(std::byte* to, const std::byte* from,
                                                                   std::size_t bytes) {
  using Word = std::uint64_t __attribute__((aligned(1), may_alias));
  for (; bytes >= sizeof(Word); to += sizeof(Word), from += sizeof(Word), bytes -= sizeof(Word)) {
    *reinterpret_cast<volatile Word*>(to) = *reinterpret_cast<const volatile Word*>(from);
  }
  for (; bytes > 0; ++to, ++from, --bytes) {
    *static_cast<volatile std::byte*>(to) = *static_cast<const volatile std::byte*>(from);
  }
}

// The part of a view that begins at `offset`.
View::Part part_at(const View& view, std::size_t offset) {
  for (const View::Part& part : view.parts) {
    if (offset < part.bytes) return {part.data + offset, part.bytes - offset, part.backing};
    offset -= part.bytes;
  }
  return {nullptr, 0, nullptr};
}

void copy_piece(const View& to, const View& from, std::size_t offset, std::size_t bytes) {
  while (bytes > 0) {
    const View::Part target = part_at(to, offset);
    const View::Part source = part_at(from, offset);
    const std::size_t length = std::min({bytes, target.bytes, source.bytes, kBounceBytes});
    // Host memory is read and written by memcpy, which sanitizers watch.
    std::array<std::byte, kBounceBytes> bounce;
    if (source.backing == nullptr) {
      std::memcpy(bounce.data(), source.data, length);
      device_copy(target.data, bounce.data(), length);
    } else if (target.backing == nullptr) {
      device_copy(bounce.data(), source.data, length);
      std::memcpy(target.data, bounce.data(), length);
    } else {
      device_copy(target.data, source.data, length);
    }
    offset += length;
    bytes -= length;
  }
}

struct Copy {
  Place to;
  Place from;
  std::size_t bytes;
  bool is_memset = false;
  unsigned char value = 0;
  bool staged = false;
  unsigned delay_us = 0;
};

CUresult view_of(const Copy& copy, const Place& place, const Context& context, CUmemAccess_flags access, View& view) {
  Memory& memory = *driver().memory;
  if (place.host == nullptr) return memory.view(place.address, copy.bytes, context, access, view);
  // No longer pinned: the engine finds nothing at this address.
  if (!copy.staged && !memory.is_pinned(place.host, copy.bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  view.parts.push_back({place.host, copy.bytes, nullptr});
  return CUDA_SUCCESS;
}

CUresult execute(const Copy& copy, Lock& lock, Worker& worker) {
  Driver& state = driver();
  ++state.copies;
  if (state.fail_after > 0 && --state.fail_after == 0) return state.fail_with;
  const unsigned delay = copy.delay_us;
  lock.unlock();
  worker.pause(delay);
  lock.lock();
  if (worker.context().error != CUDA_SUCCESS) return worker.context().error;

  View to;
  View from;
  std::vector<std::byte> values;
  CUresult error = view_of(copy, copy.to, worker.context(), CU_MEM_ACCESS_FLAGS_PROT_READWRITE, to);
  if (error == CUDA_SUCCESS && !copy.is_memset) {
    error = view_of(copy, copy.from, worker.context(), CU_MEM_ACCESS_FLAGS_PROT_READ, from);
  }
  if (error != CUDA_SUCCESS) return error;
  lock.unlock();
  if (copy.is_memset) {
    values.assign(copy.bytes, std::byte{copy.value});
    from.parts.push_back({values.data(), values.size(), nullptr});
  }
  std::size_t piece = std::max(kPiece, copy.bytes / kMaxPieces);
  piece = (piece + kLine - 1) / kLine * kLine;
  std::vector<std::size_t> order((copy.bytes + piece - 1) / piece);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), worker.random());
  for (const std::size_t index : order) {
    if (index != order.front()) worker.pause(delay / 4);
    copy_piece(to, from, index * piece, std::min(piece, copy.bytes - index * piece));
  }
  lock.lock();
  return CUDA_SUCCESS;
}

// Whether the driver stages the copy: an engine does not reach a side by itself.
bool is_staged(const Copy& copy, const Context& context) {
  Memory& memory = *driver().memory;
  const auto staged = [&](const Place& place) {
    return place.host != nullptr ? !memory.is_pinned(place.host, copy.bytes) : memory.is_staged(place.address, context);
  };
  return staged(copy.to) || (!copy.is_memset && staged(copy.from));
}

CUresult begin(Call& call, Copy copy, CUstream handle, bool wait) {
  if (call.error() != CUDA_SUCCESS) return call.error();
  Driver& state = driver();
  const auto stream = find_stream(call, handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (copy.bytes == 0) return stream->context->error;
  const auto is_memory = [&](const Place& place) {
    return place.host != nullptr ? !state.memory->is_device_address(reinterpret_cast<CUdeviceptr>(place.host))
                                 : state.memory->covers(place.address, copy.bytes);
  };
  if (!is_memory(copy.to) || (!copy.is_memset && !is_memory(copy.from))) return CUDA_ERROR_INVALID_VALUE;
  copy.staged = is_staged(copy, *stream->context);
  copy.delay_us = state.delay_us;
  if (copy.staged) {
    ++state.pageable_copies;
    state.wait_for_kernels(call.lock());
  }
  if (stream->context->error != CUDA_SUCCESS) return stream->context->error;
  stream->has_copied = true;
  push(stream, [copy](Lock& lock, Worker& worker) { return execute(copy, lock, worker); });
  if (!wait && !copy.staged) return CUDA_SUCCESS;
  const auto last = stream->queued;
  state.changed.wait(call.lock(), [&] { return stream->completed >= last; });
  return stream->context->error;
}

}  // namespace
}  // namespace standin

using standin::begin;
using standin::Call;

STANDIN_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  Call call(Call::kContext);
  auto* const host = static_cast<std::byte*>(const_cast<void*>(from));
  return begin(call, {.to = {.address = to}, .from = {.host = host}, .bytes = bytes}, stream, false);
}

STANDIN_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  Call call(Call::kContext);
  return begin(call, {.to = {.host = static_cast<std::byte*>(to)}, .from = {.address = from}, .bytes = bytes}, stream,
               false);
}

STANDIN_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  Call call(Call::kContext);
  return begin(call, {.to = {.address = to}, .from = {.address = from}, .bytes = bytes}, stream, false);
}

STANDIN_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  Call call(Call::kContext | Call::kNoKernel);
  auto* const host = static_cast<std::byte*>(const_cast<void*>(from));
  return begin(call, {.to = {.address = to}, .from = {.host = host}, .bytes = bytes}, nullptr, true);
}

STANDIN_EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  Call call(Call::kContext | Call::kNoKernel);
  return begin(call, {.to = {.host = static_cast<std::byte*>(to)}, .from = {.address = from}, .bytes = bytes}, nullptr,
               true);
}

// A kernel of the driver: its first use may load a module, which waits for other kernels.
STANDIN_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  Call call(Call::kContext | Call::kNoKernel);
  return begin(call, {.to = {.address = to}, .from = {}, .bytes = bytes, .is_memset = true, .value = value}, stream,
               false);
}
