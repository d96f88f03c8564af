// What the plugin sets of the QPs for puts when it connects them.
#include <infiniband/verbs.h>

#include <set>

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

}  // namespace
}  // namespace rma_test
