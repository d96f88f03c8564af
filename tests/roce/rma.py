"""Puts, gets and signals. Ranks that are threads use rxe0. For lanes that fail, two processes have two devices each, which
two wires connect."""

import re

from programs import report_googletest, succeed
from report import expect

SETTINGS = {"VERBATIM_SOCKET_IFNAME": "lo", "VERBATIM_CLOSE_TIMEOUT_MS": "500"}
CASES = "*RmaData*/v14:*RmaTable*/v14-*Properties*"  # of the newest table; Properties needs two devices
# Rank 0 has rxe1 and rxe3, rank 1 has rxe2 and rxe4. The kernel delivers packets to its own addresses without a wire,
# unless the route comes from a table that is looked up before the table local. Those of a device to itself stay there.
# A machine that has started anew has none.
WIRES = """
[ ! -e /sys/class/net/veth1 ] || exit 0
set -e
ip rule add pref 100 lookup local
ip rule del pref 0
for rail in 0 1; do
  ip link add veth$((2 * rail + 1)) type veth peer name veth$((2 * rail + 2))
  for rank in 0 1; do
    end=$((2 * rail + rank + 1))
    ip addr add 10.78.$rail.$((rank + 1))/24 dev veth$end
    sysctl -qw net.ipv4.conf.veth$end.accept_local=1 net.ipv4.conf.veth$end.rp_filter=0
    ip link set veth$end mtu 4500 up
    ip rule add pref 1 oif veth$end lookup $end
    ip rule add pref 0 oif veth$end to 10.78.$rail.$((rank + 1)) lookup local
    ip route add 10.78.$rail.0/24 dev veth$end table $end
    rdma link add rxe$end type rxe netdev veth$end
  done
done
"""
NO_WIRES = "for end in 1 2 3 4; do rdma link delete rxe$end; done; ip link del veth1; ip link del veth3"
UNTIL_ACTIVE = "until [ $(rdma link | grep -c 'rxe[1-4]/1 state ACTIVE') = 4 ]; do sleep 0.1; done"
# 268 ms per attempt. With a retry count of 7, the default, rxe retries without end.
FEW_RETRIES = {"VERBATIM_TIMEOUT": "16", "VERBATIM_RETRY_CNT": "3"}
LANE_TIMEOUT = {"VERBATIM_LANE_TIMEOUT_MS": "300"}
# Takes the routes with it. The kernel refuses rxe's packets, which does not retry (IBV_WC_LOC_QP_OP_ERR).
LINK_DOWN = ("ip", "link set veth1 down", "ip link set veth1 up; ip route add 10.78.0.0/24 dev veth1 table 1")


def lose_all(end):
    """Nothing that this end sends arrives."""
    return "tc", f"qdisc add dev {end} root netem loss 100%", f"tc qdisc del dev {end} root"


def run_lanes(report, machine, programs, fault, settings, numbers):
    """The fault comes after so many messages. Returns how many operations the two ranks have then posted again. The lane
    comes back after the repair, and carries the messages of another pass."""
    succeed(machine.start(WIRES))
    program, line, repair = fault
    results = []
    for number in numbers:
        given = {
            **SETTINGS,
            **settings,
            "VERBATIM_HCA": "=rxe1,rxe2,rxe3,rxe4",
            "PLUGIN": programs.plugin,
            "RMA_LANES_FAULT": f"{{ read go && echo {line}; }} | {program} -batch -",
            "RMA_LANES_AFTER": str(number),
            "RMA_LANES_REPAIR": f"{{ {repair}; }} && {UNTIL_ACTIVE}",
        }
        output = succeed(machine.run([programs.rma_lanes, "--gtest_filter=*FaultByCommand*"], settings=given))
        again = re.findall(r"RMA from rank \d to rank \d .* has left lane 1; (\d+) operations are posted again", output)
        expect(len(again) == 2, output)
        report.note(f"after {number} messages: rank 0 posts {again[0]} operations again, rank 1 {again[1]}")
        results.append(tuple(map(int, again)))
    return results


def check_data(report, machine, programs):
    arguments = [programs.rma_ranks, f"--gtest_filter={CASES}"]
    report_googletest(report, "rma", machine, arguments, {**SETTINGS, "PLUGIN": programs.plugin}, 10000)


def check_lanes(report, machine, programs):
    @report.case("rma: two devices for each of two ranks")
    def _():
        succeed(machine.start(WIRES))

    @report.case("rma: acknowledgements are lost, and no signal counts twice")
    def _():
        results = run_lanes(report, machine, programs, lose_all("veth2"), FEW_RETRIES, (20, 50))
        # The peer has executed all signals that are under way, up to twelve. Two gets may be, and are posted again.
        expect(min(rank_0 for rank_0, _ in results) <= 2, f"signals that the peer has executed are posted again: {results}")

    @report.case("rma: requests are lost, and rxe retries without end")
    def _():
        run_lanes(report, machine, programs, lose_all("veth1"), LANE_TIMEOUT, (30,))

    @report.case("rma: a link goes down")
    def _():
        run_lanes(report, machine, programs, LINK_DOWN, FEW_RETRIES, (15, 60))

    @report.case("rma: these devices are removed")
    def _():
        succeed(machine.start(WIRES))
        succeed(machine.start(NO_WIRES))


def check(report, machine, programs):
    check_data(report, machine, programs)
    check_lanes(report, machine, programs)
