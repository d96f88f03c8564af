#include "ncclapi/nccl.h"

namespace verbatim::ncclapi {

Nccl::Functions::Functions(const std::string& library) : from(library) {
  from.find("ncclGetVersion", version);
  from.find("ncclGetUniqueId", get_id);
  from.find("ncclCommInitRank", init);
  from.find("ncclCommDestroy", destroy);
  from.find("ncclCommGetAsyncError", async_error);
  from.find("ncclGetErrorString", error_string);
  from.find("ncclGroupStart", group_start);
  from.find("ncclGroupEnd", group_end);
  from.find("ncclSend", send);
  from.find("ncclRecv", recv);
}

std::string Nccl::version() const {
  int version = 0;
  check(nccl_.version(&version), "ncclGetVersion");
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Nccl::UniqueId Nccl::make_id() const {
  UniqueId id{};
  check(nccl_.get_id(&id), "ncclGetUniqueId");
  return id;
}

Nccl::Comm Nccl::init(int ranks, const UniqueId& id, int rank) const {
  Comm comm = nullptr;
  check(nccl_.init(&comm, ranks, id, rank), "ncclCommInitRank");
  return comm;
}

void Nccl::destroy(Comm comm) const {
  check(nccl_.destroy(comm), "ncclCommDestroy");
}

void Nccl::group_start() const {
  check(nccl_.group_start(), "ncclGroupStart");
}

void Nccl::group_end() const {
  check(nccl_.group_end(), "ncclGroupEnd");
}

void Nccl::send(const std::byte* data, std::size_t bytes, int peer, Comm comm, memory::Gpu::Stream stream) const {
  check(nccl_.send(data, bytes, kNcclUint8, peer, comm, stream), "ncclSend");
}

void Nccl::recv(std::byte* data, std::size_t bytes, int peer, Comm comm, memory::Gpu::Stream stream) const {
  check(nccl_.recv(data, bytes, kNcclUint8, peer, comm, stream), "ncclRecv");
}

void Nccl::check_async(Comm comm) const {
  Result error = kNcclSuccess;
  check(nccl_.async_error(comm, &error), "ncclCommGetAsyncError");
  if (error != kNcclInProgress) check(error, "asynchronous error of the communicator");
}

void Nccl::check(Result result, const char* what) const {
  if (result == kNcclSuccess) return;
  throw ranks::Failure(std::string(what) + ": " + nccl_.error_string(result));
}

}  // namespace verbatim::ncclapi
