//: in softverbs_parts_test

// The tables of QP state transitions (InfiniBand specification, volume 1, table 91).
#include "softverbs/engine/qp_transitions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace verbatim::softverbs {
namespace {

constexpr int kInit = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kRtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kRts =
    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

int attributes_for(ibv_qp_state to) {
  return to == IBV_QPS_INIT ? kInit : to == IBV_QPS_RTR ? kRtr : to == IBV_QPS_RTS ? kRts : int{IBV_QP_STATE};
}

// Whether there is a transition, with the attributes that it requires or with none.
bool exists(ibv_qp_state from, ibv_qp_state to) {
  return is_transition_allowed(IBV_QPT_RC, from, to, attributes_for(to)) ||
         is_transition_allowed(IBV_QPT_RC, from, to, IBV_QP_STATE);
}

TEST(QpTransitions, AllowedTransitions_MatchTheStandard) {
  const std::set<std::pair<ibv_qp_state, ibv_qp_state>> known{
      {IBV_QPS_RESET, IBV_QPS_INIT}, {IBV_QPS_INIT, IBV_QPS_INIT}, {IBV_QPS_INIT, IBV_QPS_RTR},
      {IBV_QPS_RTR, IBV_QPS_RTS},    {IBV_QPS_RTS, IBV_QPS_RTS},   {IBV_QPS_RTS, IBV_QPS_SQD},
      {IBV_QPS_SQD, IBV_QPS_RTS},    {IBV_QPS_SQD, IBV_QPS_SQD},
  };
  for (int from = IBV_QPS_RESET; from <= IBV_QPS_ERR; ++from) {
    for (int to = IBV_QPS_RESET; to <= IBV_QPS_ERR; ++to) {
      const auto pair = std::pair(static_cast<ibv_qp_state>(from), static_cast<ibv_qp_state>(to));
      const bool always = to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET);
      EXPECT_EQ(exists(pair.first, pair.second), always || known.contains(pair)) << from << " -> " << to;
    }
  }
}

TEST(QpTransitions, RequiredAttributeMissing_IsRefused) {
  const std::pair<ibv_qp_state, ibv_qp_state> steps[] = {
      {IBV_QPS_RESET, IBV_QPS_INIT}, {IBV_QPS_INIT, IBV_QPS_RTR}, {IBV_QPS_RTR, IBV_QPS_RTS}};
  for (const auto& [from, to] : steps) {
    const int all = attributes_for(to);
    EXPECT_TRUE(is_transition_allowed(IBV_QPT_RC, from, to, all));
    for (int bit = 1; bit <= all; bit <<= 1) {
      if ((all & bit) == 0 || bit == IBV_QP_STATE) continue;
      EXPECT_FALSE(is_transition_allowed(IBV_QPT_RC, from, to, all & ~bit))
          << from << " -> " << to << " without " << bit;
    }
  }
}

TEST(QpTransitions, AttributeOfAnotherTransition_IsRefused) {
  EXPECT_FALSE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, kInit | IBV_QP_SQ_PSN));
  EXPECT_FALSE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, kRtr | IBV_QP_TIMEOUT));
  EXPECT_FALSE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS, kRts | IBV_QP_PATH_MTU));
  EXPECT_FALSE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN));
  EXPECT_FALSE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_ERR, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS));
}

// The table of the standard: each attribute is required, optional, or not allowed.
TEST(QpTransitions, EveryAttribute_IsRequiredOptionalOrRefused) {
  constexpr int kLive =
      IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_MIN_RNR_TIMER;
  const struct {
    ibv_qp_state from;
    ibv_qp_state to;
    int required;
    int optional;
  } steps[] = {
      {IBV_QPS_RESET, IBV_QPS_INIT, kInit, 0},
      {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
      {IBV_QPS_INIT, IBV_QPS_RTR, kRtr, IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
      {IBV_QPS_RTR, IBV_QPS_RTS, kRts, kLive},
      {IBV_QPS_RTS, IBV_QPS_RTS, 0, kLive},
      {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
      {IBV_QPS_SQD, IBV_QPS_RTS, 0, kLive},
      {IBV_QPS_SQD, IBV_QPS_SQD, 0,
       IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC |
           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX |
           IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE},
      {IBV_QPS_RTS, IBV_QPS_ERR, 0, IBV_QP_CUR_STATE},
      {IBV_QPS_ERR, IBV_QPS_RESET, 0, IBV_QP_CUR_STATE},
  };
  for (const auto& step : steps) {
    const int required = step.required | IBV_QP_STATE;
    for (int bit = 1; bit <= IBV_QP_RATE_LIMIT; bit <<= 1) {
      if (bit == IBV_QP_STATE) continue;
      SCOPED_TRACE(std::to_string(step.from) + " -> " + std::to_string(step.to) + ", " + std::to_string(bit));
      if ((required & bit) != 0) {
        EXPECT_FALSE(is_transition_allowed(IBV_QPT_RC, step.from, step.to, required & ~bit));
      } else {
        EXPECT_EQ(is_transition_allowed(IBV_QPT_RC, step.from, step.to, required | bit), (step.optional & bit) != 0);
      }
    }
    EXPECT_TRUE(is_transition_allowed(IBV_QPT_RC, step.from, step.to, required | step.optional));
  }
}

// The same for the types without acknowledgements, with the state SQE. A transition that is not in the table is
// refused.
TEST(QpTransitions, UnreliableTypes_MatchTheStandard) {
  constexpr int kUcInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  constexpr int kUcLive = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
  constexpr int kUdInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
  constexpr int kUdLive = IBV_QP_CUR_STATE | IBV_QP_QKEY;
  struct Row {
    ibv_qp_state from;
    ibv_qp_state to;
    int required;
    int optional;
  };
  const std::pair<ibv_qp_type, std::vector<Row>> tables[] = {
      {IBV_QPT_UC,
       {{IBV_QPS_RESET, IBV_QPS_INIT, kUcInit, 0},
        {IBV_QPS_INIT, IBV_QPS_INIT, 0, kUcInit},
        {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
         IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
        {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, kUcLive},
        {IBV_QPS_RTS, IBV_QPS_RTS, 0, kUcLive},
        {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
        {IBV_QPS_SQD, IBV_QPS_RTS, 0, kUcLive},
        {IBV_QPS_SQD, IBV_QPS_SQD, 0,
         IBV_QP_AV | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PATH_MIG_STATE},
        {IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS}}},
      {IBV_QPT_UD,
       {{IBV_QPS_RESET, IBV_QPS_INIT, kUdInit, 0},
        {IBV_QPS_INIT, IBV_QPS_INIT, 0, kUdInit},
        {IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
        {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, kUdLive},
        {IBV_QPS_RTS, IBV_QPS_RTS, 0, kUdLive},
        {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
        {IBV_QPS_SQD, IBV_QPS_RTS, 0, kUdLive},
        {IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
        {IBV_QPS_SQE, IBV_QPS_RTS, 0, kUdLive}}}};
  for (const auto& [type, table] : tables) {
    for (int from = IBV_QPS_RESET; from <= IBV_QPS_ERR; ++from) {
      for (int to = IBV_QPS_RESET; to <= IBV_QPS_ERR; ++to) {
        SCOPED_TRACE(std::to_string(type) + ": " + std::to_string(from) + " -> " + std::to_string(to));
        const auto row = std::find_if(table.begin(), table.end(), [&](const Row& candidate) {
          return candidate.from == from && candidate.to == to;
        });
        const bool is_end = to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET);
        const bool exists = row != table.end() || is_end;
        const int required = IBV_QP_STATE | (row != table.end() ? row->required : 0);
        const int optional = row != table.end() ? row->optional : is_end ? IBV_QP_CUR_STATE : 0;
        const auto is_allowed = [&, qp_type = type](int mask) {
          return is_transition_allowed(qp_type, static_cast<ibv_qp_state>(from), static_cast<ibv_qp_state>(to), mask);
        };
        EXPECT_EQ(is_allowed(required), exists);
        for (int bit = 1; bit <= IBV_QP_RATE_LIMIT; bit <<= 1) {
          if (bit == IBV_QP_STATE) continue;
          if ((required & bit) != 0) {
            EXPECT_FALSE(is_allowed(required & ~bit)) << bit;
          } else {
            EXPECT_EQ(is_allowed(required | bit), exists && (optional & bit) != 0) << bit;
          }
        }
      }
    }
  }
}

TEST(QpTransitions, OptionalAttribute_IsAccepted) {
  EXPECT_TRUE(
      is_transition_allowed(IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, kRtr | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX));
  EXPECT_TRUE(
      is_transition_allowed(IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS, kRts | IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER));
  EXPECT_TRUE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTS, IBV_QP_ACCESS_FLAGS));
  EXPECT_TRUE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
  EXPECT_TRUE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_SQD, IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_TIMEOUT));
  EXPECT_TRUE(is_transition_allowed(IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_ERR, IBV_QP_STATE | IBV_QP_CUR_STATE));
}

}  // namespace
}  // namespace verbatim::softverbs
