#include "net/comm.h"

#include <cstdio>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "net/net.h"
#include "verbs/errors.h"

namespace verbatim {

Comm::Comm(CommKind kind, Context& context, Endpoint endpoint, ControlMemory control)
    : context_(context), endpoint_(std::move(endpoint)), control_(std::move(control)), kind_(kind) {}

wire::Hello Comm::hello() const {
  wire::Hello hello;
  hello.control_address = reinterpret_cast<std::uint64_t>(written_by_peer());
  hello.host = context_.host_name();
  endpoint_.describe(hello);
  for (std::size_t i = 0; i < hello.devices.size(); ++i) hello.devices[i].control_rkey = control_.rkey(i);
  return hello;
}

Result<std::unique_ptr<MemoryHandle>> Comm::register_memory(const MrRequest& request) {
  return verbatim::register_memory(endpoint_.ports(), request);
}

void Comm::fail(ErrorKind kind, const char* operation, const std::string& what) {
  if (failed_) return;
  failed_ = true;
  error_ = {kind, 0, operation};
  VERBATIM_WARN("%s", what.c_str());
}

void Comm::fail_completion(const ibv_wc& completion, std::size_t qp, const std::string& operation) {
  const Verbs& verbs = endpoint_.ports()[endpoint_.qps()[qp].device]->device->verbs();
  char what[768];
  std::snprintf(what, sizeof what, "%s failed with %s (%d, vendor error %u) on %s", operation.c_str(),
                verbs.wc_status_str(completion.status), completion.status, completion.vendor_err,
                endpoint_.describe_path(qp).c_str());
  fail(ErrorKind::kRemote, "completion", what);
}

void Comm::fail_post(const char* operation, int returned, std::size_t qp) {
  const Status status = check_errno(operation, returned);
  char what[640];
  std::snprintf(what, sizeof what, "%s failed with %s on %s", operation, std::strerror(status.error().sys_errno),
                endpoint_.describe_path(qp).c_str());
  fail(ErrorKind::kSystem, operation, what);
}

}  // namespace verbatim
