// Kernels that poll GPU memory while RDMA WRITEs land in it: whether NCCL's LL128 protocol, and data that is announced
// by a later write, work on the device.
//
// lines: each thread reads 16 bytes and eight threads read a line of 128 bytes, whose last 8 bytes are its flag, as in
// LL128. A line is torn when a read has the new flag and old data.
// signals: a WRITE of data and then a WRITE of 8 bytes to another address. The data is late when a kernel that has read
// the signal reads old data.
//
// The writer is this process (from host memory, the GPU of the kernel, the other GPU) or a second process (from host
// memory and its GPU). The second process is forked before CUDA is initialized. Every wait has a deadline, also in the
// kernels: no kernel is left behind.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_check.h"
#include "lines_kernels.cuh"
#include "rdma_endpoint.h"

namespace verbatim::gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kWriterDeadline = std::chrono::seconds(10);
constexpr auto kKernelDeadline = std::chrono::seconds(30);
constexpr unsigned kLifetimeSeconds = 580;  // of the whole program

// --- The writer ---

enum class Kind : std::uint32_t {
  kLines,
  kSignalBehind,           // the signal is posted behind the data, on its QP
  kSignalAfterCompletion,  // the signal is posted on another QP when the completion of the data has been polled
};

struct Job {
  Kind kind;
  std::uint32_t source;  // index of the writer's source
  std::uint64_t bytes;   // of a message
  std::uint64_t messages;
  bool mutate;  // the flag or the signal is written before the data

  unsigned slots() const { return kind == Kind::kLines ? kLineSlots : kSignalSlots; }
  std::size_t slot_bytes() const { return kind == Kind::kLines ? kMaxMessage : kSignalSlotBytes; }
};

constexpr int kHostMemory = -1;

class Writer {
 public:
  explicit Writer(Shared& shared) : shared_(shared), endpoint_(2) {}

  Endpoint& endpoint() { return endpoint_; }
  void set_target(const RemoteTarget& target) { target_ = target; }
  // Adds a source in the memory of this GPU, or in host memory.
  void add_source(int gpu);
  // Writes all messages. Returns the seconds that it took.
  double run(const Job& job);

 private:
  struct Source {
    const std::byte* address;
    std::uint32_t lkey;
  };
  bool is_slot_free(const Job& job, std::uint64_t message) const;
  void write_data(const Job& job, std::uint64_t message);
  void write_signal(const Job& job, std::uint64_t message);

  Shared& shared_;
  Endpoint endpoint_;
  RemoteTarget target_{};
  std::vector<Source> sources_;
};

void Writer::add_source(int gpu) {
  const auto bytes = static_cast<std::byte*>(std::aligned_alloc(kPiece, kSourceBytes));
  if (bytes == nullptr) throw std::bad_alloc();
  std::memset(bytes, 0, kSourceBytes);
  auto* const words = reinterpret_cast<Word*>(bytes);
  constexpr std::size_t kWordsOfMessage = kMaxMessage / sizeof(Word);
  for (unsigned generation = 0; generation < kGenerations; ++generation) {
    for (std::size_t word = 0; word < kWordsOfMessage; ++word) {
      words[generation * kWordsOfMessage + word] =
          content(generation, word / kWordsOfLine, static_cast<unsigned>(word % kWordsOfLine));
    }
  }
  void* address = bytes;
  if (gpu != kHostMemory) {
    check(cudaSetDevice(gpu), "cudaSetDevice");
    check(cudaMalloc(&address, kSourceBytes), "cudaMalloc");
    check(cudaMemcpy(address, bytes, kSourceBytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::free(bytes);
  }
  const ibv_mr* const mr = endpoint_.register_memory(address, kSourceBytes, gpu != kHostMemory);
  sources_.push_back({static_cast<const std::byte*>(address), mr->lkey});
}

bool Writer::is_slot_free(const Job& job, std::uint64_t message) const {
  if (message < job.slots()) return true;
  const Word& ack = shared_.acks[message % job.slots() * kAckStride];
  return __atomic_load_n(&ack, __ATOMIC_ACQUIRE) == message - job.slots() + 1;
}

// The identifier of a request: even for data, odd for a signal.
void Writer::write_data(const Job& job, std::uint64_t message) {
  const Source& source = sources_.at(job.source);
  const std::byte* const from = source.address + generation_of(message) * kMaxMessage;
  const std::uint64_t to = target_.address + message % job.slots() * job.slot_bytes();
  if (job.kind == Kind::kLines && job.mutate) {
    // The first line's flag is in its second half.
    constexpr std::size_t kHalf = kLineBytes / 2;
    endpoint_.write(0, from + kHalf, source.lkey, job.bytes - kHalf, to + kHalf, target_.rkey, 2 * message, 0);
    endpoint_.write(0, from, source.lkey, kHalf, to, target_.rkey, 2 * message, IBV_SEND_SIGNALED);
    return;
  }
  endpoint_.write(0, from, source.lkey, job.bytes, to, target_.rkey, 2 * message, IBV_SEND_SIGNALED);
}

void Writer::write_signal(const Job& job, std::uint64_t message) {
  const Word value = message + 1;
  const std::uint64_t to = target_.address + kSignalsOffset + message % job.slots() * kLineBytes;
  endpoint_.write(job.kind == Kind::kSignalBehind ? 0 : 1, &value, 0, sizeof value, to, target_.rkey, 2 * message + 1,
                  IBV_SEND_SIGNALED | IBV_SEND_INLINE);
}

double Writer::run(const Job& job) {
  const auto start = Clock::now();
  auto last_progress = start;
  const bool signals = job.kind != Kind::kLines;
  std::uint64_t data_posted = 0;
  std::uint64_t data_completed = 0;
  std::uint64_t signals_posted = 0;
  std::uint64_t signals_completed = 0;
  std::array<ibv_wc, 16> completions{};
  while (data_completed < job.messages || (signals && signals_completed < job.messages)) {
    bool progress = false;
    // The kernel may acknowledge bytes before the completion of their write has been polled.
    const bool has_room =
        data_posted - std::min(data_completed, signals ? signals_completed : data_completed) < kDepth / 2;
    if (data_posted < job.messages && has_room && is_slot_free(job, data_posted)) {
      const bool behind = job.kind == Kind::kSignalBehind;
      if (behind && job.mutate) write_signal(job, signals_posted++);
      write_data(job, data_posted++);
      if (behind && !job.mutate) write_signal(job, signals_posted++);
      progress = true;
    }
    const std::uint64_t ready = job.mutate ? data_posted : data_completed;
    if (job.kind == Kind::kSignalAfterCompletion && signals_posted < ready) {
      write_signal(job, signals_posted++);
      progress = true;
    }
    const unsigned found = endpoint_.poll(completions);
    for (unsigned i = 0; i < found; ++i) ++(completions[i].wr_id % 2 == 0 ? data_completed : signals_completed);
    if (progress || found != 0) {
      last_progress = Clock::now();
    } else if (Clock::now() - last_progress > kWriterDeadline) {
      throw std::runtime_error("no progress: " + std::to_string(data_posted) + " messages posted, " +
                               std::to_string(data_completed) + " completed, the slot of the next one is " +
                               (is_slot_free(job, data_posted) ? "free" : "not acknowledged by the kernel"));
    }
  }
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// --- The second process ---

// What the first process sends at the start.
struct Opening {
  Address peers[2];
  RemoteTarget target;
  int gpu;
};

// What the second process answers: to the opening with its addresses, to a job with the seconds.
struct Answer {
  bool success;
  Address addresses[2];
  double seconds;
  char error[200];
};

template <typename T>
void send_to(int socket, const T& message) {
  if (send(socket, &message, sizeof message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof message)) {
    throw std::runtime_error("the other process has ended");
  }
}

template <typename T>
bool receive_from(int socket, T& message) {
  return recv(socket, &message, sizeof message, 0) == static_cast<ssize_t>(sizeof message);
}

int run_second_process(Shared& shared, int socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Opening opening{};
  if (!receive_from(socket, opening)) return EXIT_SUCCESS;  // the first process needs no second one
  std::unique_ptr<Writer> writer;
  const auto answer = [&](const auto& work) {
    Answer result{};
    try {
      work(result);
      result.success = true;
    } catch (const std::exception& error) {
      std::snprintf(result.error, sizeof result.error, "the second process: %s", error.what());
    }
    send_to(socket, result);
  };
  answer([&](Answer& result) {
    check(cudaSetDevice(opening.gpu), "cudaSetDevice");
    check(cudaFree(nullptr), "cudaFree");  // makes the context: softverbs uses CUDA only where a process has loaded it
    writer = std::make_unique<Writer>(shared);
    writer->set_target(opening.target);
    writer->add_source(kHostMemory);
    writer->add_source(opening.gpu);
    for (unsigned qp = 0; qp < 2; ++qp) {
      writer->endpoint().connect(qp, opening.peers[qp]);
      result.addresses[qp] = writer->endpoint().address(qp);
    }
  });
  for (Job job{}; receive_from(socket, job);) {
    answer([&](Answer& result) {
      if (writer == nullptr) throw std::runtime_error("not opened");
      result.seconds = writer->run(job);
    });
  }
  return EXIT_SUCCESS;
}

// --- The first process ---

struct Options {
  double seconds = 1;                     // of polling, for each source and size of lines
  std::uint64_t signals = 1'000'000;      // messages with a signal posted behind them, for each source
  std::uint64_t signals_after = 200'000;  // with a signal posted after their completion
  bool mutate = false;
};

struct Source {
  std::string name;
  bool is_second_process;
  std::uint32_t index;  // of the writer's sources
};

class Test {
 public:
  Test(Shared& shared, int socket, const Options& options) : shared_(shared), socket_(socket), options_(options) {}

  void open();
  void run();
  // Whether nothing was torn or late.
  bool good() const { return torn_ == 0 && late_ == 0; }

 private:
  double write(const Source& source, const Job& job);
  // Runs one job beside its kernel. Returns the seconds, and adds to `seen`.
  double run_job(const Source& source, Job job, Seen& seen);
  void run_lines(const Source& source, std::size_t bytes);
  void run_signals(const Source& source, Kind kind, std::uint64_t messages);

  Shared& shared_;
  const int socket_;
  const Options options_;
  int gpus_ = 0;
  unsigned max_lines_ = 0;  // that a kernel polls with all its blocks on the GPU at the same time
  std::unique_ptr<Endpoint> reader_;
  std::unique_ptr<Writer> writer_;
  std::vector<Source> sources_;
  cudaStream_t stream_ = nullptr;
  Word* target_ = nullptr;
  Word* acks_ = nullptr;
  Word* arrived_ = nullptr;
  Seen* seen_ = nullptr;
  Word torn_ = 0;
  Word late_ = 0;
};

void Test::open() {
  check(cudaGetDeviceCount(&gpus_), "cudaGetDeviceCount");
  if (gpus_ == 0) throw std::runtime_error("no GPU");
  check(cudaSetDevice(0), "cudaSetDevice");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, poll_lines, kThreadsOfBlock, 0), "occupancy");
  max_lines_ = static_cast<unsigned>(blocks * properties.multiProcessorCount) * kThreadsOfBlock / kThreadsOfLine;
  std::printf("# kernel on GPU 0 of %d (%s)\n", gpus_, properties.name);

  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  void* memory = nullptr;
  check(cudaMalloc(&memory, kTargetBytes), "cudaMalloc");
  target_ = static_cast<Word*>(memory);
  check(cudaMalloc(&memory, kSignalSlots * sizeof(Word)), "cudaMalloc");
  arrived_ = static_cast<Word*>(memory);
  check(cudaMalloc(&memory, sizeof(Seen)), "cudaMalloc");
  seen_ = static_cast<Seen*>(memory);
  check(cudaHostRegister(&shared_, sizeof shared_, cudaHostRegisterMapped), "cudaHostRegister");
  check(cudaHostGetDevicePointer(&memory, shared_.acks, 0), "cudaHostGetDevicePointer");
  acks_ = static_cast<Word*>(memory);

  reader_ = std::make_unique<Endpoint>(4);  // two for each writer
  const ibv_mr* const mr = reader_->register_memory(target_, kTargetBytes, true);
  const RemoteTarget target{reinterpret_cast<std::uint64_t>(target_), mr->rkey};

  writer_ = std::make_unique<Writer>(shared_);
  writer_->set_target(target);
  for (unsigned qp = 0; qp < 2; ++qp) {
    reader_->connect(qp, writer_->endpoint().address(qp));
    writer_->endpoint().connect(qp, reader_->address(qp));
  }
  writer_->add_source(kHostMemory);
  sources_.push_back({"host", false, 0});
  writer_->add_source(0);
  sources_.push_back({"same GPU", false, 1});
  if (gpus_ > 1) {
    writer_->add_source(1);
    sources_.push_back({"other GPU", false, 2});
  } else {
    std::printf("# one GPU: nothing is written from another one\n");
  }
  check(cudaSetDevice(0), "cudaSetDevice");

  const Opening opening{{reader_->address(2), reader_->address(3)}, target, gpus_ > 1 ? 1 : 0};
  send_to(socket_, opening);
  Answer answer{};
  if (!receive_from(socket_, answer)) throw std::runtime_error("the second process has ended");
  if (!answer.success) throw std::runtime_error(answer.error);
  for (unsigned qp = 0; qp < 2; ++qp) reader_->connect(2 + qp, answer.addresses[qp]);
  sources_.push_back({"process, host", true, 0});
  sources_.push_back({"process, GPU " + std::to_string(opening.gpu), true, 1});
}

double Test::write(const Source& source, const Job& job) {
  if (!source.is_second_process) return writer_->run(job);
  send_to(socket_, job);
  Answer answer{};
  if (!receive_from(socket_, answer)) throw std::runtime_error("the second process has ended");
  if (!answer.success) throw std::runtime_error(answer.error);
  return answer.seconds;
}

double Test::run_job(const Source& source, Job job, Seen& seen) {
  job.source = source.index;
  // Nothing of the previous job may look like a message of this one.
  check(cudaMemset(target_, 0, kTargetBytes), "cudaMemset");
  check(cudaMemset(arrived_, 0, kSignalSlots * sizeof(Word)), "cudaMemset");
  check(cudaMemset(seen_, 0, sizeof(Seen)), "cudaMemset");
  std::memset(&shared_, 0, sizeof shared_);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  Polling polling{};
  polling.data = target_;
  polling.slot_words = job.slot_bytes() / sizeof(Word);
  polling.slots = job.slots();
  polling.lines = static_cast<unsigned>(job.bytes / kLineBytes);
  polling.messages = job.messages;
  polling.signals = target_ + kSignalsOffset / sizeof(Word);
  polling.arrived = arrived_;
  polling.acks = acks_;
  polling.seen = seen_;
  if (job.kind == Kind::kLines) {
    const unsigned threads = polling.lines * kThreadsOfLine;
    const unsigned block = std::clamp(threads, 32U, kThreadsOfBlock);
    poll_lines<<<(threads + block - 1) / block, block, 0, stream_>>>(polling);
  } else {
    await_signals<<<1, kThreadsOfBlock, 0, stream_>>>(polling);
  }
  check(cudaGetLastError(), "starting a kernel");

  double seconds = 0;
  std::string error;
  try {
    seconds = write(source, job);
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  const auto deadline = Clock::now() + kKernelDeadline;
  cudaError_t state = cudaStreamQuery(stream_);
  for (; state == cudaErrorNotReady; state = cudaStreamQuery(stream_)) {
    if (Clock::now() < deadline) continue;
    std::printf("%s, %llu bytes: the kernel does not end. %s\n", source.name.c_str(),
                static_cast<unsigned long long>(job.bytes), error.c_str());
    std::fflush(stdout);
    _exit(EXIT_FAILURE);  // destructors of CUDA would wait for the kernel
  }
  check(state, "the kernel");
  Seen now{};
  check(cudaMemcpy(&now, seen_, sizeof now, cudaMemcpyDeviceToHost), "cudaMemcpy");
  seen.torn += now.torn;
  seen.late += now.late;
  seen.in_flight += now.in_flight;
  torn_ += now.torn;
  late_ += now.late;
  if (error.empty() && now.timeouts != 0) error = "messages have completed and a kernel has waited in vain for one";
  if (!error.empty()) {
    throw std::runtime_error(source.name + ", " + std::to_string(job.bytes) + " bytes: " + error + " (torn " +
                             std::to_string(now.torn) + ", late " + std::to_string(now.late) + ")");
  }
  return seconds;
}

void Test::run_lines(const Source& source, std::size_t bytes) {
  const auto lines = static_cast<unsigned>(bytes / kLineBytes);
  if (lines > max_lines_) {
    std::printf(" %-16s %9zu  not run: the GPU holds threads for %u lines at a time\n", source.name.c_str(), bytes,
                max_lines_);
    return;
  }
  // Two short runs: the first one may make mappings, from the second one follows the length of the last one.
  constexpr std::uint64_t kFirst = 200;
  constexpr std::uint64_t kMost = 200'000;
  Seen seen{};
  Job job{Kind::kLines, 0, bytes, kFirst, options_.mutate};
  run_job(source, job, seen);
  const double first_seconds = run_job(source, job, seen);
  const double wanted = options_.seconds * static_cast<double>(kFirst) / std::max(first_seconds, 1e-6);
  job.messages = std::clamp(static_cast<std::uint64_t>(wanted), kFirst, kMost);
  const double seconds = run_job(source, job, seen);
  const std::uint64_t messages = 2 * kFirst + job.messages;
  std::printf(" %-16s %9zu %9llu %13llu %9llu %12llu %9.2f\n", source.name.c_str(), bytes,
              static_cast<unsigned long long>(messages), static_cast<unsigned long long>(messages * lines), seen.torn,
              seen.in_flight, seconds / static_cast<double>(job.messages) * 1e6);
  std::fflush(stdout);
}

void Test::run_signals(const Source& source, Kind kind, std::uint64_t messages) {
  constexpr std::uint64_t kBytes = 4096;
  constexpr std::uint64_t kLargeBytes = kSignalSlotBytes;
  // One in ten messages is large.
  for (const std::uint64_t bytes : {kBytes, kLargeBytes}) {
    const std::uint64_t count = bytes == kBytes ? messages : messages / 10;
    if (count == 0) continue;
    Seen seen{};
    const double seconds = run_job(source, {kind, 0, bytes, count, options_.mutate}, seen);
    std::printf(" %-16s %9llu  %-18s %9llu %9llu %9.2f\n", source.name.c_str(), static_cast<unsigned long long>(bytes),
                kind == Kind::kSignalBehind ? "behind the data" : "after completion",
                static_cast<unsigned long long>(count), seen.late, seconds / static_cast<double>(count) * 1e6);
    std::fflush(stdout);
  }
}

void Test::run() {
  constexpr std::array<std::size_t, 8> kSizes{128, 512, 4096, 16384, 64U << 10, 128U << 10, 512U << 10, kMaxMessage};
  std::printf("# lines\n#%-16s %9s %9s %13s %9s %12s %9s\n", "from", "bytes", "messages", "lines", "torn", "in flight",
              "us each");
  for (const Source& source : sources_) {
    for (const std::size_t bytes : kSizes) run_lines(source, bytes);
  }
  std::printf("# signals\n#%-16s %9s  %-18s %9s %9s %9s\n", "from", "bytes", "signal", "messages", "late", "us each");
  for (const Source& source : sources_) {
    run_signals(source, Kind::kSignalBehind, options_.signals);
    run_signals(source, Kind::kSignalAfterCompletion, options_.signals_after);
  }
  std::printf("# torn %llu, late %llu\n", torn_, late_);
}

int run_first_process(Shared& shared, int socket, const Options& options) {
  alarm(kLifetimeSeconds);
  // An answer takes at most as long as the writer may take for all messages of a job.
  const timeval timeout{240, 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  Test test(shared, socket, options);
  try {
    test.open();
    test.run();
  } catch (const std::exception& error) {
    std::printf("lines: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return test.good() ? EXIT_SUCCESS : EXIT_FAILURE;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) return false;
    const double value = std::atof(argv[i + 1]);
    if (name == "--seconds") {
      options.seconds = value;
    } else if (name == "--signals") {
      options.signals = static_cast<std::uint64_t>(value);
    } else if (name == "--signals-after") {
      options.signals_after = static_cast<std::uint64_t>(value);
    } else if (name == "--mutate") {
      options.mutate = value != 0;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace verbatim::gpu

int main(int argc, char** argv) {
  using namespace verbatim::gpu;
  Options options;
  if (!parse(argc, argv, options)) {
    std::printf(
        "usage: lines [--seconds S] [--signals N] [--signals-after N] [--mutate 1]\n"
        "Polls GPU memory while RDMA WRITEs land in it. Exit status 1: a line was torn, data was later than its "
        "signal,\n"
        "or something failed. --mutate 1 writes flags and signals before their data: both must then be found.\n");
    return 2;
  }
  // A kernel that is loaded at its first start may wait for one that runs.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int sockets[2];
  if (memory == MAP_FAILED || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
    std::perror("lines");
    return EXIT_FAILURE;
  }
  Shared& shared = *new (memory) Shared{};
  const pid_t second = fork();
  if (second < 0) {
    std::perror("fork");
    return EXIT_FAILURE;
  }
  close(sockets[second == 0 ? 0 : 1]);
  if (second == 0) return run_second_process(shared, sockets[1]);
  const int status = run_first_process(shared, sockets[0], options);
  std::fflush(stdout);
  if (status != EXIT_SUCCESS) kill(second, SIGKILL);  // it may still wait for the kernel
  close(sockets[0]);                                  // it ends
  waitpid(second, nullptr, 0);
  return status;
}
