#include "softverbs/engine/qp_transitions.h"

#include <array>
#include <span>

namespace verbatim::softverbs {
namespace {

struct Transition {
  ibv_qp_state from;
  ibv_qp_state to;
  int required;
  int optional;
};

constexpr int kPathChange =
    IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE;

constexpr std::array kReliableConnection{
    Transition{IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    Transition{IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    Transition{IBV_QPS_INIT, IBV_QPS_RTR,
               IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                   IBV_QP_MIN_RNR_TIMER,
               IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    Transition{IBV_QPS_RTR, IBV_QPS_RTS,
               IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
               kPathChange},
    Transition{IBV_QPS_RTS, IBV_QPS_RTS, 0, kPathChange},
    Transition{IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    Transition{IBV_QPS_SQD, IBV_QPS_RTS, 0, kPathChange},
    Transition{IBV_QPS_SQD, IBV_QPS_SQD, 0,
               IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                   IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS |
                   IBV_QP_PKEY_INDEX | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE},
};

constexpr int kUnreliablePathChange = IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE;

constexpr std::array kUnreliableConnection{
    Transition{IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    Transition{IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    Transition{IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
               IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    Transition{IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, kUnreliablePathChange},
    Transition{IBV_QPS_RTS, IBV_QPS_RTS, 0, kUnreliablePathChange},
    Transition{IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    Transition{IBV_QPS_SQD, IBV_QPS_RTS, 0, kUnreliablePathChange},
    Transition{IBV_QPS_SQD, IBV_QPS_SQD, 0,
               IBV_QP_AV | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PATH_MIG_STATE},
    Transition{IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS},
};

constexpr int kQkeyChange = IBV_QP_CUR_STATE | IBV_QP_QKEY;

constexpr std::array kUnreliableDatagram{
    Transition{IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    Transition{IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
    Transition{IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    Transition{IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, kQkeyChange},
    Transition{IBV_QPS_RTS, IBV_QPS_RTS, 0, kQkeyChange},
    Transition{IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    Transition{IBV_QPS_SQD, IBV_QPS_RTS, 0, kQkeyChange},
    Transition{IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    Transition{IBV_QPS_SQE, IBV_QPS_RTS, 0, kQkeyChange},
};

std::span<const Transition> transitions_of(ibv_qp_type type) {
  if (type == IBV_QPT_UD) return kUnreliableDatagram;
  if (type == IBV_QPT_UC) return kUnreliableConnection;
  return kReliableConnection;
}

}  // namespace

bool is_transition_allowed(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to, int mask) {
  const int attributes = mask & ~IBV_QP_STATE;
  // The specification allows the transition from any state to the error state; Linux (qp_state_table) not from RESET.
  if (from == IBV_QPS_RESET && to == IBV_QPS_ERR) return false;
  // Allowed from any other state. No attribute except the current state may be given.
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return (attributes & ~IBV_QP_CUR_STATE) == 0;
  for (const Transition& transition : transitions_of(type)) {
    if (transition.from != from || transition.to != to) continue;
    return (attributes & transition.required) == transition.required &&
           (attributes & ~(transition.required | transition.optional)) == 0;
  }
  return false;
}

}  // namespace verbatim::softverbs
