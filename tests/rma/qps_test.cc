//: all VERBATIM_VERBS_LIBRARY={counted_verbs}
//: test rma-qps filter=RmaQps.*
//: test rma-posts filter=RmaPosts.*

// What the plugin sets of the QPs for puts when it connects them, and what it posts when a post fails.
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdlib>
#include <set>
#include <vector>

#include "ranks.h"
#include "support/counted_verbs/modifications.h"

namespace rma_test {
namespace {

constexpr int kLabelledContexts = 8;

// Four random numbers of 24 bits are different but in one of three million runs. The QPs of two ranks to each other,
// one for each context, and of each to itself.
TEST(RmaQps, Puts_HaveFlowLabelsAndPsnsOfTheirOwn) {
  std::set<std::uint32_t> psns;
  for (int set = 0; set < 2; ++set) {
    const verbatim::test::Modifications modifications;
    Ranks ranks(2, 0);
    ranks.run_connected({.contexts = kLabelledContexts}, [](Rank&) {});
    std::multiset<std::uint32_t> labels;
    for (const ibv_qp_attr& attributes : modifications.that_set(IBV_QP_AV)) {
      if (attributes.ah_attr.grh.flow_label != 0) labels.insert(attributes.ah_attr.grh.flow_label);
    }
    EXPECT_EQ(labels.size(), 2U * kLabelledContexts) << "those to oneself need none";
    for (const std::uint32_t label : labels) {
      EXPECT_EQ(labels.count(label), 2U) << "the same at both ends, and another one for each context";
      EXPECT_EQ(label - *labels.begin(), label % kLabelledContexts) << "eight that follow one another use all paths";
    }
    EXPECT_EQ(modifications.expected_psns(), modifications.first_psns());
    EXPECT_EQ(modifications.first_psns().size(), 2U) << "one for each rank";
    psns.merge(modifications.first_psns());
  }
  EXPECT_EQ(psns.size(), 4U);
}

// What comes behind bytes that were not posted must not be posted either: the signal would say that they are there.
TEST(RmaPosts, PartOfAPutIsNotPosted_SignalDoesNotCome) {
  constexpr std::size_t kBytes = 16'384;  // in four parts
  for (long nth = 1; nth <= 4; ++nth) {
    Ranks ranks(2, 14);
    const std::vector<int> statuses = ranks.run_processes([&](Rank& rank) {
      ::setenv("SOFTVERBS_MAX_MSG_SZ", "5000", 1);
      ::setenv("SOFTVERBS_ENGINE", "inline", 1);  // what was posted is done in a few calls
      rank.connect();
      rank.create({});
      Words words(2 * kBytes / sizeof(std::uint64_t));
      Words signals(512);
      void* const memory = rank.register_memory(words.data(), words.bytes());
      void* const word = rank.register_memory(signals.data(), signals.bytes(), nccl::kMrForceStrictOrdering);
      rank.barrier();
      if (rank.number() == 0) {
        rank.keep_warnings();
        verbatim::test::verbs_counters().fail.arm("ibv_post_send", nth, ENOMEM);
        const RmaSignal signal{.word = {word, 0}, .operation = nccl::kSignalIncrement, .strong = true};
        void* request = nullptr;
        EXPECT_EQ(rank.net().iput_signal(rank.contexts, 0, {memory, 0}, kBytes, {memory, kBytes}, 1, signal, &request),
                  nccl::Result::kSystemError);
        for (int i = 0; i < 1000; ++i) EXPECT_NE(rank.net().progress(rank.contexts), nccl::Result::kSuccess);
        rank.net().destroy_context(rank.contexts);
      }
      rank.barrier();
      EXPECT_EQ(signals[0], 0U);
      if (rank.number() == 1) rank.net().destroy_context(rank.contexts);
      EXPECT_OK(rank.net().close_coll(rank.coll));
      EXPECT_OK(rank.net().finalize(rank.instance));
    });
    for (const int status : statuses) EXPECT_EQ(status, 0) << nth;
  }
}

}  // namespace
}  // namespace rma_test
