#include "ranks/job.h"
#include "verbatim-kv/options.h"
#include "verbatim-kv/rank.h"

using namespace verbatim;

int main(int argc, char** argv) {
  return ranks::run_or_leave(kv::parse_options(argc, argv), [&](const kv::Options& options) {
    return ranks::run_job(options.job, argc, argv,
                          [&options](ranks::Link& link) { return kv::make_rank(options, link); });
  });
}
