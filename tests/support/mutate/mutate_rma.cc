// An RMA plugin (v14) that spoils one call of another plugin. Tests use it to show that checks of bytes and signals
// fail.
//
//   MUTATE_PLUGIN  path of the plugin that transfers the data; this table has its calls, and its own that move data
//   MUTATE_MODE    none       changes nothing (control run: the test that uses this plugin must pass)
//                  flip-byte  adds 1 to the target behind a put whose offset is a multiple of 8
//                  short      transfers one byte less
//                  overrun    transfers one byte more
//                  elsewhere  writes 8 bytes behind the target, and 8 bytes less
//                  no-data    signals without the put
//                  no-put     puts nothing, without a signal
//                  no-signal  puts without the signal
//                  early      signals before the put
//                  twice      signals a second time
//                  value      adds one more than the signal's value
//                  extra      signals a second time, in the word behind the signal's
//   MUTATE_NTH     which of the calls that the mode can change is changed, counted from 1 (default 1); only this one
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nccl/rma_v14.h"

// The name is NCCL's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" __attribute__((visibility("default"))) nccl::rma_v14::Rma ncclRmaPlugin_v14;

nccl::rma_v14::Rma ncclRmaPlugin_v14{};

namespace {

using nccl::Result;

nccl::rma_v14::Rma inner{};
const char* mode = "none";
std::atomic<long> countdown{1};

bool is_mode(const char* name) {
  return std::strcmp(mode, name) == 0;
}

// Whether this call is the one to change.
bool is_due() {
  return countdown.fetch_sub(1) == 1;
}

void spoil_transfer(std::size_t& size, std::uint64_t& written_offset) {
  if (size <= 8 || (!is_mode("short") && !is_mode("overrun") && !is_mode("elsewhere")) || !is_due()) return;
  if (is_mode("overrun")) ++size;
  if (is_mode("short")) --size;
  if (is_mode("elsewhere")) size -= 8;
  if (is_mode("elsewhere")) written_offset += 8;
}

// Adds to a word of a rank, behind what was put there before.
void add(void* rma_context, int context, std::uint32_t rank, std::uint64_t offset, void* mhandle, std::uint64_t value) {
  void* extra = nullptr;
  const Result started = inner.iputSignal(rma_context, context, 0, nullptr, 0, 0, nullptr, rank, offset, mhandle, value,
                                          nccl::kSignalAdd, true, &extra);
  int done = 0;
  while (started == Result::kSuccess && done == 0) {
    if (inner.test(nullptr, extra, &done) != Result::kSuccess) break;
  }
}

Result put(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle, std::size_t size,
           std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank, void** request) {
  spoil_transfer(size, target_offset);
  if (is_mode("no-put") && size != 0 && is_due()) size = 0;
  const Result started = inner.iput(rma_context, context, source_offset, source_mhandle, size, target_offset,
                                    target_mhandle, rank, request);
  if (started == Result::kSuccess && is_mode("flip-byte") && size != 0 && target_offset % 8 == 0 && is_due()) {
    add(rma_context, context, rank, target_offset, target_mhandle, 1);
  }
  return started;
}

Result get(void* rma_context, int context, std::uint64_t remote_offset, void* remote_mhandle, std::size_t size,
           std::uint64_t local_offset, void* local_mhandle, std::uint32_t rank, void** request) {
  spoil_transfer(size, local_offset);
  return inner.iget(rma_context, context, remote_offset, remote_mhandle, size, local_offset, local_mhandle, rank,
                    request);
}

Result put_signal(void* rma_context, int context, std::uint64_t source_offset, void* source_mhandle, std::size_t size,
                  std::uint64_t target_offset, void* target_mhandle, std::uint32_t rank, std::uint64_t signal_offset,
                  void* signal_mhandle, std::uint64_t signal_value, std::uint32_t signal_operation, bool strong_signal,
                  void** request) {
  spoil_transfer(size, target_offset);
  if (is_mode("no-data") && size != 0 && is_due()) size = 0;
  const std::uint64_t value = signal_operation == nccl::kSignalIncrement ? 1 : signal_value;
  const bool is_early = is_mode("early") && size != 0 && is_due();
  if (is_early || (is_mode("twice") && is_due())) add(rma_context, context, rank, signal_offset, signal_mhandle, value);
  if (is_early || (is_mode("no-signal") && is_due())) {
    return inner.iput(rma_context, context, source_offset, source_mhandle, size, target_offset, target_mhandle, rank,
                      request);
  }
  if (is_mode("value") && is_due()) {
    signal_value = value + 1;
    signal_operation = nccl::kSignalAdd;
  }
  if (is_mode("extra") && is_due()) add(rma_context, context, rank, signal_offset + 8, signal_mhandle, 1);
  return inner.iputSignal(rma_context, context, source_offset, source_mhandle, size, target_offset, target_mhandle,
                          rank, signal_offset, signal_mhandle, signal_value, signal_operation, strong_signal, request);
}

void* library = nullptr;

__attribute__((constructor)) void load() {
  const char* const path = std::getenv("MUTATE_PLUGIN");
  if (path != nullptr) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* const table = library == nullptr ? nullptr : dlsym(library, "ncclRmaPlugin_v14");
  if (table == nullptr) {
    std::fprintf(stderr, "mutate: MUTATE_PLUGIN: %s\n", path == nullptr ? "not set" : dlerror());
    std::abort();
  }
  if (const char* const given = std::getenv("MUTATE_MODE")) mode = given;
  if (const char* const nth = std::getenv("MUTATE_NTH")) countdown = std::atol(nth);
  inner = *static_cast<const nccl::rma_v14::Rma*>(table);
  ncclRmaPlugin_v14 = inner;
  ncclRmaPlugin_v14.iput = put;
  ncclRmaPlugin_v14.iputSignal = put_signal;
  ncclRmaPlugin_v14.iget = get;
}

__attribute__((destructor)) void unload() {
  if (library != nullptr) dlclose(library);
}

}  // namespace
