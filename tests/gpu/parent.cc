#include "parent.h"

#include <sys/socket.h>

#include <cstdio>
#include <stdexcept>

#include "check.h"

namespace verbatim::gpu {

Report make_report(Report::Kind kind, const std::string& text) {
  Report report{};
  report.kind = kind;
  std::snprintf(report.text, sizeof report.text, "%s", text.c_str());
  return report;
}

bool Parent::try_send(const Report& report) {
  return ::send(socket_, &report, sizeof report, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof report);
}

void Parent::send(const Report& report) {
  if (!try_send(report)) throw std::runtime_error("the parent has ended");
}

Report Parent::receive(Report::Kind kind) {
  Report report{};
  if (recv(socket_, &report, sizeof report, 0) != static_cast<ssize_t>(sizeof report)) {
    throw std::runtime_error("the parent has ended");
  }
  if (report.kind != kind)
    throw std::runtime_error("the parent sent another kind of message: the ranks run different steps");
  return report;
}

ncclUniqueId Parent::exchange_id(int rank) {
  if (rank != 0) return receive(Report::Kind::kId).id;
  Report report = make_report(Report::Kind::kId);
  check(ncclGetUniqueId(&report.id), "ncclGetUniqueId");
  send(report);
  return report.id;
}

void Parent::barrier() {
  send(make_report(Report::Kind::kBarrier));
  static_cast<void>(receive(Report::Kind::kBarrier));
}

}  // namespace verbatim::gpu
