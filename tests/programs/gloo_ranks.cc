// Runs the collectives of Gloo that its ibverbs transport supports: gloo_ranks RANK SIZE DIRECTORY DEVICE GID_INDEX.
// Each rank is a process. Prints "right" when every element of every result is.
#include <gloo/allgather_ring.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/ibverbs/device.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

using Word = std::int64_t;
using Pointers = std::vector<Word*>;
using InputPointers = std::vector<const Word*>;

Word element(int rank, std::size_t index) {
  return static_cast<Word>(index * 7 + 1) * (rank + 1);
}

std::vector<Word> contribution(int rank, std::size_t count) {
  std::vector<Word> words(count);
  for (std::size_t i = 0; i < count; ++i) words[i] = element(rank, i);
  return words;
}

bool check(const char* name, std::size_t count, bool right) {
  if (!right) std::printf("%s of %zu words: wrong\n", name, count);
  return right;
}

// Gloo forbids that an algorithm is destroyed before the completions of its last sends have been read, and has no call
// that waits for them: none is destroyed.
template <typename Algorithm, typename... Arguments>
void run(Arguments... arguments) {
  (new Algorithm(arguments...))->run();
}

template <typename Algorithm>
bool check_allreduce(const char* name, const std::shared_ptr<gloo::Context>& context, std::size_t count) {
  std::vector<Word>& words = *new std::vector<Word>(contribution(context->rank, count));
  run<Algorithm>(context, Pointers{words.data()}, static_cast<int>(count));
  bool right = true;
  const Word ranks = context->size;
  for (std::size_t i = 0; i < count; ++i) right = right && words[i] == element(0, i) * ranks * (ranks + 1) / 2;
  return check(name, count, right);
}

bool check_all(const std::shared_ptr<gloo::Context>& context, std::size_t count) {
  bool right = check_allreduce<gloo::AllreduceRing<Word>>("AllreduceRing", context, count);
  right = check_allreduce<gloo::AllreduceRingChunked<Word>>("AllreduceRingChunked", context, count) && right;
  right = check_allreduce<gloo::AllreduceHalvingDoubling<Word>>("AllreduceHalvingDoubling", context, count) && right;

  std::vector<Word>& words = *new std::vector<Word>(contribution(context->rank, count));
  run<gloo::BroadcastOneToAll<Word>>(context, Pointers{words.data()}, static_cast<int>(count), 1);
  right = check("BroadcastOneToAll", count, words == contribution(1, count)) && right;

  words = contribution(context->rank, count);
  std::vector<Word>& gathered = *new std::vector<Word>(count * static_cast<std::size_t>(context->size));
  run<gloo::AllgatherRing<Word>>(context, InputPointers{words.data()}, gathered.data(), static_cast<int>(count));
  std::vector<Word> expected;
  for (int rank = 0; rank < context->size; ++rank) {
    const std::vector<Word> part = contribution(rank, count);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  right = check("AllgatherRing", count, gathered == expected) && right;
  run<gloo::BarrierAllToOne>(context);
  return right;
}

}  // namespace

int main(int, char** arguments) {
  const int rank = std::atoi(arguments[1]);
  const int size = std::atoi(arguments[2]);
  gloo::transport::ibverbs::attr attributes{};
  attributes.name = arguments[4];
  attributes.port = 1;
  attributes.index = std::atoi(arguments[5]);
  auto device = gloo::transport::ibverbs::CreateDevice(attributes);
  std::printf("%s, PCI device %s\n", device->str().c_str(), device->getPCIBusID().c_str());
  gloo::rendezvous::FileStore store(arguments[3]);
  const std::shared_ptr<gloo::rendezvous::Context>& context =
      *new std::shared_ptr(std::make_shared<gloo::rendezvous::Context>(rank, size));
  context->connectFullMesh(store, device);
  bool right = true;
  for (const std::size_t count : {1UL, 5UL, 1000UL, 100'000UL}) right = check_all(context, count) && right;
  // A rank that has its results may still have sends to make, so none ends before all have theirs.
  std::vector<std::string> all;
  for (int other = 0; other < size; ++other) all.push_back("done-" + std::to_string(other));
  store.set(all[static_cast<std::size_t>(rank)], {'1'});
  store.wait(all);
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}
