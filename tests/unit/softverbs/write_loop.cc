//: program softverbs_write_loop optimized link=verbs_test

// usage: write_loop COUNT
// Posts COUNT 8-byte WRITEs between two QPs of this process, one at a time, and polls each completion.
// instructions_test.py counts its instructions.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "support/verbs_fixture.h"

namespace verbatim::test {
namespace {

int run(unsigned long count) {
  const Device device = open_device();
  const Region source(device.pd.get(), 64);
  const Region target(device.pd.get(), 64);
  Endpoint a(device);
  Endpoint b(device);
  connect(a, b);
  ibv_sge sge = source.sge(0, 8);
  ibv_send_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma = {target.address(), target.mr->rkey};
  ibv_send_wr* bad = nullptr;
  ibv_wc wc{};
  ibv_qp* const qp = a.qp();
  ibv_cq* const cq = a.send_cq();
  for (unsigned long i = 0; i < count; ++i) {
    if (ibv_post_send(qp, &wr, &bad) != 0) return EXIT_FAILURE;
    while (ibv_poll_cq(cq, 1, &wc) == 0) {
    }
    if (wc.status != IBV_WC_SUCCESS) return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace verbatim::test

int main(int argc, char** argv) {
  if (argc != 2) return EXIT_FAILURE;
  try {
    return verbatim::test::run(std::strtoul(argv[1], nullptr, 10));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}
