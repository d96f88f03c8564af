#!/usr/bin/env python3
# Programs without a sanitizer's runtime load neither the plugin nor softverbs with one.
#: all suite=tools sanitizer=none needs=softverbs,softverbs_mlx5,softverbs_files
#:   + args='--top {verbatim_top} --perf {verbatim_perf} --plugin {plugin} --launcher {source}/tools/softverbs'
#:   + args='--verbs {softverbs_dir} --page {source}/plugin/STATE.md'
#: test verbatim-top priority=5 args='--control {softverbs_control} Top'
#: test verbatim-exporter priority=5 args='--exporter {verbatim_exporter} --jobs 3 Exporter'
#: test verbatim-exporter-prometheus full args='--exporter {verbatim_exporter} Prometheus'
#:   + PROGRAMS_REQUIRED={programs_required}
"""verbatim-top and verbatim-exporter with running processes of verbatim-perf over softverbs: live_test.py OPTIONS CASES...

With --jobs N, the cases of the only class in CASES run in N processes at a time.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import multiprocessing.pool
import os
import pty
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.parse

PARSER = argparse.ArgumentParser()
for option in ("top", "perf", "plugin", "launcher", "verbs", "page", "exporter", "control"):
    PARSER.add_argument(f"--{option}")
PARSER.add_argument("--jobs", type=int, default=1)
OPTIONS, CASES = PARSER.parse_known_args()
TIMEOUT_S = 60
REQUEST = b"GET /metrics HTTP/1.1\r\n\r\n"
TEXT = r'"(?:[^"\\]|\\[\\"n])*"'  # of a label
LABEL = re.compile(rf"(\w+)=({TEXT})")
SERIES = re.compile(rf"(\w+)(?:\{{(\w+={TEXT}(?:,\w+={TEXT})*)\}})? (\S+)")
HOSTILE_LABEL = 'a"b\\c\\n{},='
# Named by what they count.
OPEN_OBJECTS = ("ports[].counters", "ports[].growth_s", "connections[].latency", "processes[].connections[].latency_us")
LATENCIES = {"send": {"isend_to_completion"}, "recv": {"irecv_to_arrival", "cts_to_data"}}


def environment(directory, **settings):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERBATIM_", "NCCL_"))}
    return {**kept, "VERBATIM_STATE_DIR": directory, "VERBATIM_SOCKET_IFNAME": "lo", **settings}


def over_softverbs(*command):
    return [OPTIONS.launcher, "--lib", OPTIONS.verbs, "--namespace", f"live-{os.getpid()}", "--", *command]


def perf(*arguments, operation="sendrecv"):
    return over_softverbs(OPTIONS.perf, operation, "--plugin", OPTIONS.plugin, *arguments)


def fields(value, path=""):
    """The paths of all fields: connections[].local.bytes."""
    if isinstance(value, list):
        return set().union(*(fields(member, f"{path}[]") for member in value)) if value else set()
    if not isinstance(value, dict) or path in OPEN_OBJECTS:
        return set()
    names = {name: f"{path}.{name}".lstrip(".") for name in value}
    return set(names.values()).union(*(fields(member, names[name]) for name, member in value.items()))


def explained(heading):
    """The first column of the tables of a section of the page; every field has a unit in the second."""
    with open(OPTIONS.page, encoding="utf-8") as page:
        section = page.read().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", section, re.M)
    assert rows and all(unit.strip() for _, unit in rows), heading
    assert len(rows) == len({name for name, _ in rows}), heading
    return {name for name, _ in rows}


def without_queues(heading):
    """What the page explains for processes without RMA contexts."""
    return {field for field in explained(heading) if not field.startswith("rma[].")}


def read_state(path):
    with socket.socket(socket.AF_UNIX) as reader:
        reader.connect(path)
        return json.loads(b"".join(iter(lambda: reader.recv(65536), b"")))


def rma_queue(reading, context, peer, factor):
    """Its numbers grow by `factor` times the same with each reading; factor 0: it has stalled."""
    counts = {"puts": 10, "signals": 4, "gets": 3, "flushes": 2}
    grown = {name: number * factor * reading for name, number in counts.items()}
    return {"context": context, "peer": peer, "peer_host": f"node{peer}", "qp": 1, "peer_qp": 2, "posted": grown,
            "completed": {**grown, "put_bytes": 4096 * grown["puts"], "get_bytes": 512 * grown["gets"]},
            "outstanding": 1 if factor else 3, "no_progress_ms": 1500 if factor else 12000, "stalled": False}


NOBODY = 65534


def state_of(reading=1, **more):
    """The state of a process that does nothing."""
    return {"schema": 2, "host": "node0", "pid": 4711, "program": "served", "time_ns": reading * 10**9, "connections": [], "rma": [], **more}


def long_state(spaces):
    return json.dumps(state_of()).encode() + b" " * spaces


def numbered(count):
    """Names of state sockets."""
    return [f"1-{number:08x}" for number in range(count)]


def receiver(number, device, **more):
    """A connection of a state."""
    local = {"messages": 0, "bytes": 0, "outstanding": 0, "no_progress_ms": 0, "flushes": 0}
    return {"number": number, "direction": "recv", "device": device, "peer_host": "node1", "peer_pid": 5, "state": "open", "error": None,
            "stall_cause": None, "lanes": 1, "lanes_down": 0, "local": local, **more}


def waiting(peer, direction="recv", cause=None, lanes_down=0, **local):
    """A connection that has not moved for 3 seconds. It waits for the peer unless `local` or the cause says otherwise."""
    numbers = {"messages": 7, "bytes": 0, "outstanding": int(direction == "recv"), "no_progress_ms": 3000, "tested": True,
               **({"flushes": 0} if direction == "recv" else {"send_refused": True, "cts_ready": False}), **local}
    return {"number": peer + 10 * (direction == "send"), "direction": direction, "device": "softverbs0:1", "peer_host": "node0", "peer_pid": peer,
            "state": "open", "error": None, "stall_cause": cause, "lanes": 1, "lanes_down": lanes_down, "local": numbers}


# The causes of a stall with the process 3, as the processes write them.
CAUSES = {
    "network": "the network, or the device: data between this end and the peer node0 (pid 3) was posted and is not acknowledged",
    "cts": "the network, or the device: the CTS entry of a receive between this end and the peer node0 (pid 3) was written and has not arrived",
    "device": "the device: all data of the peer node0 (pid 3) was acknowledged, and the completion has not arrived",
    "flush": "this host's device: a flush of GPU memory does not complete (data of the peer node0 (pid 3))",
    "own": "this process is late: its application does not test its requests for the peer node0 (pid 3)",
    "late": "the peer node0 (pid 3) is late: its application has not sent",
    "no answer": "the peer node0 (pid 3) does not answer: its process is stopped or hangs, its host is down, or it is cut off",
}


def listening_socket(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def answer_all(listeners, state):
    """Until a listener is shut down."""
    while True:
        for listener in select.select(listeners, [], [])[0]:
            try:
                reader, _ = listener.accept()
            except OSError:
                return
            with reader, contextlib.suppress(ConnectionError):  # the reader does not want all of it
                reader.sendall(state)


def serve_as_another_user(user, directory, names, state, pipe):
    """Processes with names that all have the same state. The pipe gets why there are none, or None."""
    try:
        os.setgid(user)
        os.setuid(user)
        listeners = [listening_socket(f"{directory}/{name}") for name in names]
    except OSError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    for listener in listeners:  # each answers on its own
        threading.Thread(target=answer_all, args=([listener], state)).start()


def is_open(connection):
    """Whether the other end has neither sent something nor closed the connection."""
    return not select.select([connection], [], [], 0)[0]


def rma_set(number, rank, queues, error=None):
    return {"number": number, "rank": rank, "ranks": 64, "contexts": 2, "qps": 128, "device": "softverbs0:1",
            "failed": error is not None, "error": error, "queues": queues}


def stalled_and_failed(reading):
    queues = [rma_queue(reading, 0, 1, 1), rma_queue(reading, 1, 2, 2), rma_queue(reading, 0, 3, 0)]
    return [rma_set(1, 0, queues), rma_set(2, 5, [], "rank 2 has ended")]


class Live(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = f"{scratch.name}/state"
        self.job = None
        self.readings = 0  # of the process that is served

    def start_job(self, **settings):
        """Two ranks that send to each other until the test ends. Returns their IDs."""
        self.start_perf("sendrecv", **settings)
        return self.eventually(lambda: self.running_ranks())

    def start_perf(self, operation, *arguments, **settings):
        # Ranks that poll without a pause would take all processors from the tests beside this one.
        job = ("-b", "64K", "-e", "64K", "-n", "100000000", "--timeout", "60", "--pause", "500")
        command = perf(*job, *arguments, operation=operation)
        self.job = subprocess.Popen(command, env=environment(self.directory, **settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(self.end_job)

    def start_puts(self):
        """Two ranks that put to both in two contexts until the test ends, a quarter of 64 KiB with each put."""
        self.start_perf("alltoall_put", "--contexts", "2")

        def busy():
            states = self.states() if os.path.isdir(self.directory) else []
            found = len(states) == 2 and all(state["rma"] and len(state["rma"][0]["queues"]) == 4 for state in states)
            return states if found else None

        return self.eventually(busy)

    def states(self):
        return [read_state(path) for path in self.sockets()]

    def serve(self, rma_of):
        """A process whose state has the RMA sets rma_of(number of the reading, from 1), a second between two readings."""
        self.serve_bytes(lambda reading: json.dumps(state_of(reading, rma=rma_of(reading))).encode())

    def serve_bytes(self, bytes_of):
        """A process whose state is bytes_of(number of the reading, from 1). Returns the errors of its writing."""
        os.makedirs(self.directory, 0o700, exist_ok=True)
        listener = listening_socket(f"{self.directory}/{os.getpid()}-0a1b2c3d")
        errors = []

        def answer():
            for reading in range(1, 1000):
                try:
                    reader, _ = listener.accept()
                except OSError:  # the test has ended
                    return
                self.readings = reading
                with reader:
                    try:
                        reader.sendall(bytes_of(reading))
                    except OSError as error:
                        errors.append(error)

        thread = threading.Thread(target=answer)
        thread.start()

        def end():
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listener.close()

        self.addCleanup(end)
        return errors

    def serve_many(self, states):
        """Processes of this user."""
        os.mkdir(self.directory, 0o700)
        for name, state in zip(numbered(len(states)), states, strict=True):
            listener = listening_socket(f"{self.directory}/{name}")
            thread = threading.Thread(target=answer_all, args=([listener], json.dumps(state).encode()))
            thread.start()
            self.addCleanup(listener.close)
            self.addCleanup(thread.join)
            self.addCleanup(listener.shutdown, socket.SHUT_RDWR)

    def serve_as_another_user(self, names, state, user=NOBODY):
        """Returns the directory of the other user."""
        scratch = os.path.dirname(self.directory)
        os.chmod(scratch, 0o711)
        directory = f"{scratch}/{user}"
        os.mkdir(directory, 0o700)
        own, other = multiprocessing.Pipe()
        try:
            os.chown(directory, user, user)
        except OSError as error:
            self.skipTest(f"this user cannot be another one: {error}")
        process = multiprocessing.get_context("fork").Process(target=serve_as_another_user, args=(user, directory, names, state, other))
        process.start()
        self.addCleanup(process.join)
        self.addCleanup(process.kill)
        self.assertTrue(own.poll(TIMEOUT_S))
        if why := own.recv():
            self.skipTest(f"this user cannot be another one: {why}")
        return directory

    def running_ranks(self):
        shown = self.top()["processes"]
        busy = [process["pid"] for process in shown if process["sent"]["bytes_s"] > 0 and process["received"]["bytes_s"] > 0]
        return sorted(busy) if len(busy) == 2 else None

    def end_job(self):
        if self.job.poll() is None:
            self.job.terminate()
            self.job.wait(TIMEOUT_S)

    def eventually(self, check):
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if (result := check()) is not None and result is not False:
                return result
            time.sleep(0.1)
        raise AssertionError("not within a minute")

    def sockets(self):
        return [f"{self.directory}/{name}" for name in sorted(os.listdir(self.directory))]

    def run_top(self, *arguments, launcher=()):
        command = [*launcher, OPTIONS.top, "--once", "--interval", "0.2", *arguments]
        done = subprocess.run(command, env=environment(self.directory), capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def top(self, *arguments, launcher=()):
        return json.loads(self.run_top("--json", *arguments, launcher=launcher))


PUT_BYTES = 65536 // 4  # of start_puts()
LOOK_FIRST_AT = {field for field in explained("verbatim-top --once --json") if field.startswith("look_first_at[].")}
RMA_FIELDS = {field for field in explained("verbatim-top --once --json") if field.startswith("processes[].rma[].")}


class Top(Live):
    def test_RunningJob_AllConnectionsHaveRatesAndPeers(self):
        ranks = self.start_job()
        view = self.top("--sort", "pid")
        self.assertEqual(view["schema"], 2)
        self.assertEqual([process["pid"] for process in view["processes"]], ranks)
        self.assertEqual(view["problems"], [])
        for process in view["processes"]:
            self.assertEqual((process["program"], process["user"]), ("verbatim-perf", os.geteuid()))
            (other,) = set(ranks) - {process["pid"]}
            self.assertEqual({connection["direction"] for connection in process["connections"]}, {"send", "recv"})
            for connection in process["connections"]:
                self.assertEqual((connection["peer_pid"], connection["lanes"], connection["lanes_down"]), (other, 1, 0))
                self.assertGreater(connection["bytes_s"], 0)
                self.assertGreater(connection["messages_s"], 0)
        self.assertEqual(fields(view), explained("verbatim-top --once --json") - {"problems[].path", "problems[].why",
                         *LOOK_FIRST_AT} - RMA_FIELDS)
        text = self.run_top()
        self.assertTrue(text.startswith("  2 processes, "), text)
        for rank in ranks:
            self.assertRegex(text, rf"(?m)^ +{rank} verbatim-perf +sends .*B/s")
            self.assertRegex(text, rf"(?m)^ +(sends to|receives from) +\S+:{rank} +softverbs0:1 ")

    def test_MeasuredLatencies_AreOfEveryMessageSinceTheLastSample(self):
        self.start_job(VERBATIM_LATENCY="1")
        for process in self.top()["processes"]:
            for connection in process["connections"]:
                latencies = connection["latency_us"]
                self.assertEqual(set(latencies), LATENCIES[connection["direction"]])
                for latency in latencies.values():
                    self.assertLessEqual(latency["count"], connection["messages"])
                    self.assertGreater(latency["count"], connection["messages_s"] * 0.2 / 4)
                    self.assertTrue(0 < latency["p50"] <= latency["p99"] < 10e6, latency)
        text = self.run_top()
        self.assertRegex(text, r"(?m)^ +sends to .* \d\S*( k| M)?/\d\S*( k| M)?( |$)")
        self.assertIn("P50/P99 us", text)

    def test_StateOfAProcess_PageExplainsEveryField(self):
        self.start_job()
        for path in self.sockets():
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
            state = read_state(path)
            self.assertEqual(state["schema"], 2)
            present = {field for field in fields(state) if not field.startswith("connections[].peer.")}
            self.assertEqual(present, without_queues("The state of a process"))
        self.assertEqual(os.stat(self.directory).st_mode & 0o777, 0o700)

    def test_EndedJob_LeavesNothing_AndStatisticsAreExplained(self):
        done = subprocess.run(perf("-b", "8", "-e", "8", "-n", "10", "--json", f"{self.directory}.json"),
                              env=environment(self.directory, VERBATIM_STATS=f"{self.directory}-%p.stats"),
                              capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertNotIn("warned", done.stdout + done.stderr)
        self.assertEqual(self.sockets(), [])
        self.assertEqual(self.top()["processes"], [])
        parent = os.path.dirname(self.directory)
        statistics = [name for name in os.listdir(parent) if name.endswith(".stats")]
        self.assertEqual(len(statistics), 2)
        for name in statistics:
            with open(f"{parent}/{name}", encoding="utf-8") as file:
                content = json.load(file)
            self.assertEqual(content["schema"], 1)
            without_outages = {field for field in without_queues("Statistics") if not field.startswith("connections[].outages[].")}
            self.assertEqual(fields(content), without_outages)  # no lane was down
        with open(f"{self.directory}.json", encoding="utf-8") as file:
            self.assertEqual(list(json.load(file).items())[0], ("schema", 2))

    def test_Puts_AreInTheStateAndThePageExplainsEveryField(self):
        for state in self.start_puts():
            self.assertEqual(state["connections"], [])
            explained_fields = {field for field in explained("The state of a process") if not field.startswith("connections[].")}
            self.assertEqual(fields(state), explained_fields)
            (contexts,) = state["rma"]
            self.assertEqual((contexts["ranks"], contexts["contexts"], contexts["qps"]), (2, 2, 4))
            self.assertEqual((contexts["device"], contexts["failed"], contexts["error"]), ("softverbs0:1", False, None))
            for queue in contexts["queues"]:
                self.assertIn(queue["peer"], (0, 1))
                self.assertFalse(queue["stalled"])
                for name, completed in queue["completed"].items():
                    self.assertLessEqual(completed, queue["posted"].get(name, completed))

    def test_Puts_HaveTheNumbersOfTheStateAndRates(self):
        self.start_puts()
        before = self.states()
        view = self.top("--sort", "pid")
        after = self.states()
        self.assertEqual(view["problems"], [])
        self.assertEqual([port["port"] for port in view["ports"]], ["softverbs0:1"])
        for process, earlier, later in zip(view["processes"], before, after, strict=True):
            self.assertEqual((process["pid"], process["connections"]), (earlier["pid"], []))
            (contexts,), (first,), (last,) = process["rma"], earlier["rma"], later["rma"]
            for name in ("number", "rank", "ranks", "device", "failed", "error"):
                self.assertEqual(contexts[name], first[name])
            bounds = {(queue["context"], queue["peer"]): [queue["completed"]] for queue in first["queues"]}
            for queue in last["queues"]:
                bounds[queue["context"], queue["peer"]].append(queue["completed"])
            self.assertEqual([(queue["context"], queue["peer"]) for queue in contexts["queues"]], list(bounds))
            self.assertEqual(set(bounds), {(0, 0), (0, 1), (1, 0), (1, 1)})
            for queue in contexts["queues"]:
                low, high = bounds[queue["context"], queue["peer"]]
                for name in low:
                    self.assertTrue(low[name] <= queue[name] <= high[name], (name, low, queue, high))
                self.assertTrue(low["puts"] * PUT_BYTES <= queue["put_bytes"] <= high["puts"] * PUT_BYTES, (low, queue, high))
                self.assertGreater(queue["puts_s"], 0)
                # A state is written while puts complete.
                self.assertTrue(0.5 < queue["put_bytes_s"] / (queue["puts_s"] * PUT_BYTES) < 1.5, queue)

    def test_Rma_RatesAreExact_AndStallAndFailureAreRed(self):
        self.serve(stalled_and_failed)
        view = self.top("--sort", "pid")
        self.assertEqual(fields(view) & RMA_FIELDS, RMA_FIELDS)
        (process,) = view["processes"]
        running, failed = process["rma"]
        self.assertEqual((running["number"], running["rank"], running["failed"], running["error"]), (1, 0, False, None))
        self.assertEqual((failed["number"], failed["rank"], failed["failed"], failed["error"]), (2, 5, True, "rank 2 has ended"))
        for queue, factor in zip(running["queues"], (1, 2, 0), strict=True):
            rates = {"puts_s": 10, "signals_s": 4, "gets_s": 3, "put_bytes_s": 40960, "get_bytes_s": 1536}
            self.assertEqual({name: queue[name] for name in rates}, {name: rate * factor for name, rate in rates.items()})
            self.assertEqual({name: queue[name] for name in ("puts", "signals", "gets", "flushes", "put_bytes", "get_bytes")},
                             rma_queue(2, 0, 0, factor)["completed"])
        names = ("context", "peer", "peer_host", "outstanding", "no_progress_ms", "stalled")
        self.assertEqual([tuple(queue[name] for name in names) for queue in running["queues"]],
                         [(0, 1, "node1", 1, 0, False), (1, 2, "node2", 1, 0, False), (0, 3, "node3", 3, 12000, True)])
        for sort, first in (("bytes", 2), ("messages", 2), ("outstanding", 3), ("waiting", 3)):
            self.assertEqual(self.top("--sort", sort)["processes"][0]["rma"][0]["queues"][0]["peer"], first)
        text = self.run_top()
        self.assertRegex(text, r"(?m)^! +4711 served .*, 5 outstanding, 1 stalled, RMA puts 123 kB/s, gets 4.61 kB/s, RMA failed$")
        self.assertRegex(text, r"(?m)^  +RMA 1 ctx 0 +rank 0 -> 1 node1 +softverbs0:1 +42.5 k +13 +1 +- +- +-$")
        self.assertRegex(text, r"(?m)^  +RMA 1 ctx 1 +rank 0 -> 2 node2 +softverbs0:1 +85 k +26 +1 +- +- +-$")
        self.assertRegex(text, r"(?m)^! +RMA 1 ctx 0 +rank 0 -> 3 node3 +softverbs0:1 +0 +0 +3 .* stalled, nothing completed for 12 s$")
        self.assertRegex(text, r"(?m)^! +RMA 2 +rank 5 of 64 +softverbs0:1 .* failed: rank 2 has ended$")

    def test_EndedPuts_AreInTheStatistics(self):
        done = subprocess.run(perf("-b", "4K", "-e", "4K", "-n", "10", "-w", "0", "-c", "0", operation="put_signal"),
                              env=environment(self.directory, VERBATIM_STATS=f"{self.directory}-%p.stats"),
                              capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        parent = os.path.dirname(self.directory)
        statistics = [name for name in os.listdir(parent) if name.endswith(".stats")]
        self.assertEqual(len(statistics), 2)
        contents = []
        for name in statistics:
            with open(f"{parent}/{name}", encoding="utf-8") as file:
                contents.append(json.load(file))
            explained_fields = {field for field in explained("Statistics") if not field.startswith("connections[].")}
            self.assertEqual(fields(contents[-1]), explained_fields)
            queues = [queue for contexts in contents[-1]["rma"] for queue in contexts["queues"]]
            total = contents[-1]["totals"]["rma"]
            for name, sum_of_all in total.items():
                self.assertEqual(sum_of_all, sum(queue["completed"][name] for queue in queues), name)
            for queue in queues:
                self.assertEqual(queue["outstanding"], 0)
                self.assertEqual({name: queue["completed"][name] for name in queue["posted"]}, queue["posted"])
            self.assertEqual(total["signals"], total["puts"])
            self.assertEqual(total["put_bytes"], total["puts"] * 4096)
            self.assertEqual((total["gets"], total["flushes"], total["get_bytes"]), (0, 0, 0))
        self.assertGreater(max(content["totals"]["rma"]["puts"] for content in contents), 9)

    def test_KilledProcess_Disappears(self):
        ranks = self.start_job()
        sockets = self.sockets()
        os.kill(ranks[0], signal.SIGKILL)
        self.job.wait(TIMEOUT_S)
        view = self.top()
        self.assertEqual((view["processes"], view["problems"]), ([], []))
        self.assertIn(f"{ranks[0]}-", sockets[0] + sockets[1])
        left = self.sockets()
        self.assertIn(ranks[0], [int(os.path.basename(path).split("-")[0]) for path in left])
        for path in left:
            os.utime(path, (0, 0))  # a socket that is new may be that of a process that has only begun
        self.top()
        self.assertEqual(self.sockets(), [])

    def test_StoppedProcess_IsNamedAsTheOneToLookAt(self):
        ranks = self.start_job()
        os.kill(ranks[0], signal.SIGSTOP)
        self.addCleanup(os.kill, ranks[0], signal.SIGCONT)

        def stalled():
            view = self.top("--stall", "2")
            return view if view["look_first_at"] else None

        view = self.eventually(stalled)
        self.assertEqual([process["pid"] for process in view["processes"]], ranks[1:])
        self.assertEqual([(entry["what"], entry["pid"], entry["waiting"]) for entry in view["look_first_at"]], [("process", ranks[0], 1)])
        self.assertIn("does not answer", view["problems"][0]["why"])
        connections = view["processes"][0]["connections"]
        self.assertTrue(any(connection["stalled"] and connection["waits_for"] == "peer" for connection in connections), connections)
        self.assertTrue(fields(view) >= {"problems[].path", *LOOK_FIRST_AT})
        text = self.run_top("--stall", "2")
        self.assertRegex(text, rf"(?m)^! look first at process {ranks[0]} on \S+: 1 process waits for it$")
        self.assertRegex(text, rf"(?m)^! +receives from +\S+:{ranks[0]} .*peer \S+:{ranks[0]} for \d+ s$")

    def named(self, *processes):
        """What is to be looked at first, and the lines that say so, where processes 1, 2, ... have these connections."""
        self.serve_many([state_of(pid=pid, connections=list(connections)) for pid, connections in enumerate(processes, 1)])
        found = [(one["what"], one["pid"], one["peer_pid"], one["device"], one["waiting"]) for one in self.top()["look_first_at"]]
        return found, re.findall(r"(?m)^! look first at (.*)", self.run_top())

    def test_DataThatIsNotAcknowledged_TheNetworkIsNamed_NotItsSender(self):
        found, lines = self.named([waiting(4), waiting(2, "send")], [waiting(3, "send", outstanding=2)], [waiting(2), waiting(4, "send")],
                                  [waiting(3)])
        self.assertEqual(found, [("network", 2, 3, "softverbs0:1", 4)])
        self.assertEqual(lines, ["the network between process 2 on node0 (softverbs0:1) and process 3 on node0: 4 processes wait for it"])

    def test_CausesAtBothNeighbours_TheNetworkOfTheProcessBetweenIsNamed(self):
        found, lines = self.named([waiting(4), waiting(2, "send")], [waiting(3, "send", CAUSES["cts"])],
                                  [waiting(2, cause=CAUSES["cts"]), waiting(4, "send", CAUSES["cts"])], [waiting(3, cause=CAUSES["cts"])])
        self.assertEqual(found, [("network", 3, None, "softverbs0:1", 4)])
        self.assertEqual(lines, ["the network of process 3 on node0 (softverbs0:1): 4 processes wait for it"])

    def test_NoLaneWorks_IsTheNetwork_AndShown(self):
        found, _ = self.named([waiting(2, "send", CAUSES["late"], lanes_down=1)], [waiting(1, outstanding=0, no_progress_ms=0, lanes_down=1)])
        self.assertEqual(found, [("network", 1, 2, "softverbs0:1", 1)])
        text = self.run_top("--sort", "pid")
        self.assertRegex(text, r"(?m)^! +sends to +node0:2 .* 0/1 .* no lane works for 3 s$")
        self.assertRegex(text, r"(?m)^! +receives from +node0:1 .* 0/1 .* no lane works$")

    def test_CompletionThatIsLost_TheDeviceIsNamed(self):
        found, lines = self.named([waiting(3)], [waiting(1)], [waiting(2, cause=CAUSES["device"])])
        self.assertEqual(found, [("device", 3, None, "softverbs0:1", 3)])
        self.assertEqual(lines, ["the device of process 3 on node0 (softverbs0:1): 3 processes wait for it"])

    def test_ProcessThatDoesNotTest_OrDoesNotAnswer_IsNamed(self):
        for number, processes in enumerate((
            ([waiting(3)], [waiting(1)], [waiting(1, "send", outstanding=1, tested=False)]),
            ([waiting(3)], [waiting(1)], [waiting(1, "send", CAUSES["own"], outstanding=1), waiting(2, cause=CAUSES["own"])]),
            ([waiting(3, "send", lanes_down=1), waiting(3, cause=CAUSES["no answer"], lanes_down=1)], [waiting(1)]),
        )):
            with self.subTest(number=number):
                self.directory += "-next"
                found, lines = self.named(*processes)
                self.assertEqual(found, [("process", 3, None, None, 2)])
                self.assertEqual(lines, ["process 3 on node0: 2 processes wait for it"])

    def test_ProcessThatHasCarriedNothing_MayWaitForAConnection(self):
        found, lines = self.named([waiting(2, "send", messages=0)], [waiting(1, messages=0, outstanding=0, no_progress_ms=0)])
        self.assertEqual(found, [("process", 2, None, None, 1)])
        self.assertEqual(lines, ["process 2 on node0: 1 process waits for it; it has sent and received nothing yet, and may itself wait for a "
                                 "connection that is being made"])

    def test_FaultsOfRealDevices_AreNamed(self):
        """The causes of the stalls are those that the processes write."""
        for clause, what in (("link-down", "network"), ("drop-completion op=recv", "device")):
            with self.subTest(what=what):
                self.directory += "-next"
                ranks = self.start_job(VERBATIM_STALL_WARN_S="1")
                control = [OPTIONS.control, "fault", clause, "--pid", str(ranks[1])]
                subprocess.run(control, env=environment("none", SOFTVERBS_NAMESPACE=f"live-{os.getpid()}"), check=True, stdout=subprocess.DEVNULL,
                               timeout=TIMEOUT_S)

                def named():
                    view = self.top()
                    found = view["look_first_at"]
                    stalled = [one for process in view["processes"] for one in process["connections"] if one["stall_cause"]]
                    is_known = [one["what"] for one in found] == [what] and what in [one["waits_for"] for one in stalled]
                    return found if is_known else None

                (named,) = self.eventually(named)
                self.assertEqual((named["device"], named["waiting"]), ("softverbs0:1", 2))
                self.assertIn(named["pid"], ranks if what == "network" else ranks[1:])
                self.end_job()

    def test_DirectoryThatOthersMayAccess_IsRefusedByAllWithAReason(self):
        os.mkdir(self.directory)
        os.chmod(self.directory, 0o755)
        done = subprocess.run(perf("-b", "8", "-e", "8", "-n", "10"), env=environment(self.directory), capture_output=True,
                              text=True, timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("rank 0: the plugin has warned", done.stdout + done.stderr)
        self.assertIn("other users may access it (mode 755)", done.stdout + done.stderr)
        self.assertEqual(self.sockets(), [])
        self.assertEqual(self.top()["problems"], [{"path": self.directory, "why": "other users may access it (mode 755)"}])
        self.assertIn(f"! not shown: {self.directory}: other users", self.run_top())

    def test_PortCounters_AreTheKernels(self):
        self.start_job()
        ports = self.top(launcher=over_softverbs())["ports"]
        self.assertEqual([port["port"] for port in ports], ["softverbs0:1"])
        self.assertEqual(ports[0]["counters"]["symbol_error"], 0)
        self.assertNotIn("port_xmit_data", ports[0]["counters"])

    def test_Terminal_ShowsTheProcessesUntilQ(self):
        ranks = self.start_job()
        child, terminal = pty.fork()
        if child == 0:
            os.execve(OPTIONS.top, [OPTIONS.top], environment(self.directory, TERM="xterm", COLUMNS="200", LINES="40"))
        shown = b""
        while str(ranks[1]).encode() not in shown and select.select([terminal], [], [], TIMEOUT_S)[0]:
            shown += os.read(terminal, 65536)
        self.assertIn(b"PROGRAM", shown)
        os.write(terminal, b"pcq")
        with self.assertRaises(OSError):  # the other end is closed
            while True:
                os.read(terminal, 65536)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        os.close(terminal)

    def problems(self, *arguments):
        return [problem["why"] for problem in self.top(*arguments)["problems"]]

    def test_StateThatIsTooLongOrTooDeep_IsNotReadToItsEnd(self):
        self.serve_bytes(lambda reading: b"[" * (3 << 20))
        self.eventually(lambda: self.problems() == ["its state is nested too deeply"])
        self.directory += "-long"
        errors = self.serve_bytes(lambda reading: long_state(80 << 20))
        self.eventually(lambda: self.problems() == ["its state is larger than 64 MiB"])
        self.eventually(lambda: len(errors) > 0)  # it could not write all of it

    def test_NumberThatIsNotAnInteger_IsRefused(self):
        self.serve_bytes(lambda reading: json.dumps(state_of(pid=1e300)).encode())
        self.eventually(lambda: self.problems() == ["its state has a number that is not an integer"])

    def test_LongStateOfThisUser_IsRead(self):
        self.serve_bytes(lambda reading: long_state(5 << 20))
        self.eventually(lambda: len(self.top()["processes"]) == 1)

    def test_LongStateOfAnotherUser_IsNotRead(self):
        directory = self.serve_as_another_user(numbered(1), long_state(5 << 20))
        self.eventually(lambda: self.problems("--dir", directory) == ["its state is larger than 4 MiB"])

    def test_ManySockets_TheOldestAreRead(self):
        os.mkdir(self.directory, 0o700)
        listeners = [listening_socket(f"{self.directory}/{name}") for name in numbered(300)]
        problems = self.top()["problems"]
        for listener in listeners:
            listener.close()
        self.assertEqual(problems[0]["why"], "it has more than 256 processes; the newest are not read")
        self.assertEqual({problem["path"] for problem in problems[1:]}, {f"{self.directory}/{name}" for name in numbered(256)})

    def test_ManyDirectories_AreLimited(self):
        arguments = [argument for number in range(300) for argument in ("--dir", f"{self.directory}/{number}")]
        (problem,) = self.top(*arguments)["problems"]
        self.assertEqual(problem["path"], f"{self.directory}/256")
        self.assertIn("there are more than 256 directories", problem["why"])

    def read_and_dropped(self, *directories):
        """({user: names of the processes that were read}, what is said of the others)"""
        problems = self.top(*[argument for directory in directories for argument in ("--dir", directory)])["problems"]
        if any("does not answer" in problem["why"] for problem in problems):
            return None
        read = {}
        for problem in problems:
            if problem["why"] == "its state is nested too deeply":  # that is found without parsing it
                user, name = problem["path"].split("/")[-2:]
                read.setdefault(int(user), []).append(name)
        return {user: sorted(names) for user, names in read.items()}, problems[-1]["why"]

    def test_LongStatesOfAnotherUser_TheOldestAreRead(self):
        directory = self.serve_as_another_user(numbered(12), b"[" * 4_000_000)
        for _ in range(3):
            read, why = self.eventually(lambda: self.read_and_dropped(directory))
            self.assertEqual(read, {NOBODY: numbered(8)})
            self.assertTrue(why.endswith(f"(at most 32 MiB and 2 s of a user, 64 MiB and 4 s of all): user {NOBODY}"), why)

    def test_LongStatesOfManyUsers_LeaveEachAShare(self):
        many = [NOBODY - 3, NOBODY - 2, NOBODY - 1]
        directories = [self.serve_as_another_user(numbered(12), b"[" * 4_000_000, user) for user in many]
        directories.append(self.serve_as_another_user(numbered(1), b"[" * 4_000_000))
        read, why = self.eventually(lambda: self.read_and_dropped(*directories))
        self.assertTrue(why.endswith(": " + ", ".join(f"user {user}" for user in many)), why)
        self.assertEqual(read.pop(NOBODY), numbered(1))
        for user in many:
            self.assertEqual(read[user], numbered(len(read[user])))
            self.assertGreaterEqual(len(read[user]), 5)
        self.assertLessEqual(sum(map(len, read.values())), 15)

    def test_NoTerminalOrNoDirectory_IsNamed(self):
        for directory, arguments, reason in ((self.directory, [], "there is no terminal"), ("none", ["--once"], "VERBATIM_STATE_DIR is none")):
            done = subprocess.run([OPTIONS.top, *arguments], env=environment(directory), stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=TIMEOUT_S)
            self.assertEqual(done.returncode, 3)
            self.assertIn(reason, done.stderr)


class Exporter(Live):
    def start_exporter(self, *arguments, listen="127.0.0.1:0"):
        command = [OPTIONS.exporter, "--listen", listen, *arguments]
        errors = tempfile.TemporaryFile()
        exporter = subprocess.Popen(command, env=environment(self.directory), stdout=subprocess.PIPE, stderr=errors, text=True)

        def end():
            exporter.terminate()
            with exporter.stdout, errors:
                self.assertEqual(exporter.wait(TIMEOUT_S), 0)
                errors.seek(0)
                self.assertEqual(errors.read(1000), b"")

        self.addCleanup(end)
        self.exporter = exporter
        shown = exporter.stdout.readline()
        address = re.escape(listen.rpartition(":")[0])
        self.assertRegex(shown, rf"^listening at http://{address}:\d+/metrics$")
        return int(re.search(r":(\d+)/metrics", shown)[1])

    def connect(self, port, request=b"", receive_bytes=None):
        client = socket.socket()
        self.addCleanup(client.close)
        client.settimeout(TIMEOUT_S)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.connect(("127.0.0.1", port))
        client.sendall(request)
        return client

    def sockets_of_exporter(self):
        """Its connections; and its listener and the pair with which libevent learns of signals."""
        targets = []
        for number in os.listdir(f"/proc/{self.exporter.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                targets.append(os.readlink(f"/proc/{self.exporter.pid}/fd/{number}"))
        return sum(target.startswith("socket:") for target in targets)

    def get(self, port, path, host="127.0.0.1"):
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self, port):
        """[(name, labels, value)]; every line has the form that Prometheus documents, and those of a family are together."""
        status, text = self.get(port, "/metrics")
        self.assertEqual(status, 200)
        self.assertTrue(text.endswith("\n"))
        series, types, family, helped = [], {}, None, None
        for line in text.splitlines():
            if line.startswith("#"):
                _, keyword, name, rest = line.split(" ", 3)
                self.assertNotIn(name, types)
                if keyword == "HELP":
                    helped = name
                    continue
                self.assertEqual((keyword, helped), ("TYPE", name))
                family, types[name] = name, rest
                continue
            found = SERIES.fullmatch(line)
            self.assertTrue(found, line)
            self.assertTrue(found[1].startswith("verbatim_"), line)
            histogram = re.fullmatch(r"(verbatim_latency_seconds)_(bucket|count|sum)", found[1])
            kind = "histogram" if histogram else "counter" if found[1].endswith("_total") else "gauge"
            self.assertEqual(histogram[1] if histogram else found[1], family)
            self.assertEqual(types[family], kind)
            labels = {name: re.sub(r"\\(.)", lambda pair: pair[1].replace("n", "\n"), text[1:-1]) for name, text in LABEL.findall(found[2] or "")}
            series.append((found[1], labels, float(found[3])))
        keys = [(name, tuple(sorted(labels.items()))) for name, labels, _ in series]
        self.assertEqual(len(keys), len(set(keys)))
        return series

    def values(self, port, name):
        return {tuple(labels.values()): value for found, labels, value in self.metrics(port) if found == name}

    def test_RunningJob_MetricsAreExplainedAndGrow(self):
        ranks = self.start_job(VERBATIM_LATENCY="1")
        port = self.start_exporter()
        before = self.values(port, "verbatim_bytes_total")
        self.assertEqual({int(labels[0].split("-")[0]) for labels in before}, set(ranks))
        self.assertEqual({labels[1:] for labels in before},
                         {(str(os.geteuid()), "verbatim-perf", "softverbs0:1", direction) for direction in ("send", "recv")})

        def have_grown():
            after = self.values(port, "verbatim_bytes_total")
            return all(after[labels] > value for labels, value in before.items())

        self.eventually(have_grown)
        for direction, names in LATENCIES.items():
            for rank in ranks:
                found = {labels["latency"]: value for name, labels, value in self.metrics(port) if name == "verbatim_latency_seconds_count"
                         and labels["process"].startswith(f"{rank}-") and labels["direction"] == direction}
                self.assertEqual(set(found), names)
                self.assertTrue(all(found.values()), found)
        shown = {re.sub("_(bucket|count|sum)$", "", name) for name, _, _ in self.metrics(port)}
        without_rma = {name for name in explained("Metrics of verbatim-exporter") if not name.startswith("verbatim_rma_")}
        self.assertEqual(shown | {"verbatim_port_counter_total"}, without_rma)

    def rma_metrics(self, port):
        """[(name without prefix, labels, value)]"""
        return [(name.removeprefix("verbatim_rma_"), labels, value) for name, labels, value in self.metrics(port)
                if name.startswith("verbatim_rma_")]

    def rma_series(self, port):
        """{(set, peer): {name: value}}; the metrics of the process are under ()."""
        series = {}
        for name, labels, value in self.rma_metrics(port):
            pair = (labels["set"], labels["peer"]) if "peer" in labels else ()
            series.setdefault(pair, {})[name] = value
        return series

    def next_rma_series(self, port):
        """Of a scrape of its own."""
        before = self.readings
        return self.eventually(lambda: (series := self.rma_series(port), self.readings > before)[1] and series)

    def check_puts(self, port):
        before = self.start_puts()
        shown = [one for one in self.rma_metrics(port) if "peer" in one[1]]
        for earlier, later in zip(before, self.states(), strict=True):
            (first,), (last,) = earlier["rma"], later["rma"]
            own = [one for one in shown if one[1]["process"].startswith(f"{earlier['pid']}-")]
            self.assertEqual({labels["peer"] for _, labels, _ in own}, {"0", "1"})
            for name, labels, value in own:
                self.assertEqual((labels["program"], labels["device"], labels["set"], labels["rank"], labels["peer_host"]),
                                 ("verbatim-perf", "softverbs0:1", "1", str(first["rank"]), first["queues"][0]["peer_host"]))
                low, high = ({field: sum(queue["completed"][field] for queue in contexts["queues"] if str(queue["peer"]) == labels["peer"])
                              for field in first["queues"][0]["completed"]} for contexts in (first, last))
                if name.endswith("_total"):
                    field = name.removesuffix("_total")
                    self.assertTrue(low[field] <= value <= high[field], (name, low, value, high))
                if name == "put_bytes_total":
                    self.assertTrue(0 < low["puts"] * PUT_BYTES <= value <= high["puts"] * PUT_BYTES, (low, value, high))
        self.end_job()

    def test_Rma_NumbersAreThoseOfSetsAndPeers_AndSeriesAreLimited(self):
        port = self.start_exporter()
        self.check_puts(port)

        def rma_of(reading):
            two_contexts = rma_set(3, 0, [rma_queue(reading, 0, 1, 1), rma_queue(reading, 1, 1, 4)])
            queues = [rma_queue(reading, 0, peer, 1) for peer in range(40)]
            many = rma_set(4, 0, queues)
            if reading <= 2:
                return [*stalled_and_failed(reading), two_contexts]
            if reading <= 5:
                return [two_contexts, many] if reading <= 4 else [many]
            return [rma_set(5, 0, queues[:2]), rma_set(6, 0, queues[:1])]

        self.serve(rma_of)
        self.next_rma_series(port)
        series = self.next_rma_series(port)  # the second reading
        self.assertEqual({f"verbatim_rma_{name}" for values in series.values() for name in values},
                         {name for name in explained("Metrics of verbatim-exporter") if name.startswith("verbatim_rma_")})
        self.assertEqual(series.pop(()), {"sets": 3, "sets_failed": 1})
        for pair, factor, outstanding in ((("1", "1"), 1, 1), (("1", "2"), 2, 1), (("3", "1"), 5, 2)):
            totals = {f"{name}_total": value for name, value in rma_queue(2, 0, 0, factor)["completed"].items()}
            self.assertEqual(series.pop(pair), {**totals, "outstanding": outstanding, "contexts_stalled": 0, "no_progress_seconds": 0})
        stalled = series.pop(("1", "3"))
        self.assertEqual((stalled["outstanding"], stalled["contexts_stalled"], stalled["no_progress_seconds"]), (3, 1, 12))
        self.assertEqual(series, {})
        for reading in (3, 4, 5):
            series = self.next_rma_series(port)
            pairs = {("4", str(peer)) for peer in range(31)}
            self.assertEqual(set(series), pairs | {("other", "other"), ()} | ({("3", "1")} if reading < 5 else set()))
            self.assertEqual({series[pair]["puts_total"] for pair in pairs}, {10 * reading})
            others = series["other", "other"]
            self.assertEqual((others["puts_total"], others["put_bytes_total"]), (9 * 10 * reading, 9 * 40960 * reading))
            self.assertEqual(others["outstanding"], 9)
        series = self.next_rma_series(port)
        self.assertEqual(set(series), {("5", "0"), ("5", "1"), ("6", "0"), ("other", "other"), ()})
        others = series["other", "other"]
        self.assertEqual((others["puts_total"], others["outstanding"]), (9 * 10 * 5, 0))  # they do not fall

    def test_EndedProcesses_HaveNoSeriesAnyMore(self):
        self.start_job()
        port = self.start_exporter()
        self.assertEqual(self.values(port, "verbatim_processes"), {(): 2})
        self.end_job()
        self.eventually(lambda: self.values(port, "verbatim_processes") == {(): 0})
        self.assertEqual([name for name, labels, _ in self.metrics(port) if "process" in labels], [])

    def test_MoreProcessesThanAllowed_AreOnlyCounted(self):
        self.start_job()
        port = self.start_exporter("--max-processes", "1")
        self.assertEqual(self.values(port, "verbatim_processes"), {(): 2})
        self.assertEqual(self.values(port, "verbatim_processes_not_shown"), {(): 1})
        self.assertEqual(len({labels["process"] for _, labels, _ in self.metrics(port) if "process" in labels}), 1)

    def read_until_closed(self, client):
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(65536):
                answer += part
        return answer

    def exchange(self, port, request):
        return self.read_until_closed(self.connect(port, request))

    @contextlib.contextmanager
    def stopped(self):
        """What clients do meanwhile has come to the exporter before it runs on."""
        self.exporter.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.exporter.send_signal(signal.SIGCONT)

    def test_SimultaneousRequests_AreAllAnswered(self):
        port = self.start_exporter()
        with self.stopped():
            clients = [self.connect(port, REQUEST) for _ in range(400)]
        for number, client in enumerate(clients):
            self.assertIn(b"\nverbatim_up 1\n", self.read_until_closed(client), number)

    def test_RequestThatWaitsWhileManyOthersConnect_IsAnswered(self):
        port = self.start_exporter()
        with self.stopped():
            client = self.connect(port, REQUEST)
            for number in range(600):
                self.connect(port, b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"")
        self.assertIn(b"\nverbatim_up 1\n", self.read_until_closed(client))

    def test_ManyIdleClients_DoNotDelayAScrape_AndAreClosed(self):
        port = self.start_exporter()
        own = self.sockets_of_exporter()

        def clients_during_a_scrape():
            """Returns 400 clients without a whole request if a scrape was answered before the last of them was closed."""
            clients = [self.connect(port, b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"") for number in range(400)]
            self.assertEqual(self.values(port, "verbatim_up"), {(): 1})
            self.assertLessEqual(self.sockets_of_exporter(), own + 256)
            if is_open(clients[-1]):
                return clients
            for client in clients:
                client.close()
            return None

        for client in self.eventually(clients_during_a_scrape):
            self.assertEqual(self.read_until_closed(client), b"")
        self.eventually(lambda: self.sockets_of_exporter() == own)

    def test_ClientsBeyondTheDescriptors_WaitWithoutMessages(self):
        port = self.start_exporter()
        resource.prlimit(self.exporter.pid, resource.RLIMIT_NOFILE, (24, 24))
        for _ in range(30):
            self.connect(port)
        self.assertEqual(self.get(port, "/")[0], 200)

    def test_RequestInSmallPieces_IsClosed(self):
        port = self.start_exporter()
        client = self.connect(port, b"GET /metrics HTTP/1.1\r\nName: ")

        def is_closed():
            """Each piece is progress."""
            try:
                client.sendall(b"x")
            except ConnectionError:
                return True
            return not is_open(client)

        self.eventually(is_closed)

    def serve_long_text(self, processes=6):
        """A scrape of six processes has several times the bytes that the buffers of a connection take."""
        latencies = {f"name{number}": [[1000, 1]] for number in range(8)}
        connections = [receiver(number, f"a{number}:1", latency=latencies) for number in range(40)]
        self.serve_many([state_of(connections=connections)] * processes)

    def test_ClientsThatDoNotRead_AreClosed_AndLeaveRoom(self):
        self.serve_long_text()
        port = self.start_exporter()
        own = self.sockets_of_exporter()
        clients = [self.connect(port, REQUEST, receive_bytes=4096) for _ in range(300)]
        status, text = self.get(port, "/metrics")
        self.assertEqual((status, len(text) > 2**22), (200, True))
        self.assertLessEqual(self.sockets_of_exporter(), own + 256)
        self.eventually(lambda: self.sockets_of_exporter() == own)
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                self.assertLess(len(self.read_until_closed(client)), len(text) / 2)

    def test_ClientThatReadsWithPauses_GetsAll(self):
        self.serve_long_text(processes=9)
        port = self.start_exporter()

        def whole_answer():
            """It takes longer than a client may be without progress."""
            client = self.connect(port, REQUEST, receive_bytes=2**18)
            answer = client.recv(4096)
            header, _, _ = answer.partition(b"\r\n\r\n")
            length = len(header) + 4 + int(re.search(rb"Content-Length: (\d+)", header)[1])
            start = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                while len(answer) < length and (part := client.recv(length // 20, socket.MSG_WAITALL)):
                    answer += part
                    time.sleep(0.25)
            return len(answer) == length and time.monotonic() - start > 4

        self.eventually(whole_answer)

    def test_RequestsDuringALongScrape_AreAllAnsweredAfterIt(self):
        """A process that does not answer takes the exporter's time. That is no time of the clients."""
        os.makedirs(self.directory, 0o700)
        stuck = listening_socket(f"{self.directory}/{os.getpid()}-0a1b2c3d")
        self.addCleanup(stuck.close)
        port = self.start_exporter()

        def all_are_answered():
            stuck.settimeout(TIMEOUT_S)
            clients = [self.connect(port, b"GET /metrics HTTP/1.1\r\n"), self.connect(port, REQUEST)]
            scrapes = [stuck.accept()]  # the first has begun
            clients[0].sendall(b"\r\n")
            clients += [self.connect(port, REQUEST) for _ in range(20)]
            answers = [self.read_until_closed(client) for client in clients]
            stuck.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    scrapes.append(stuck.accept())
            for connection, _ in scrapes:
                connection.close()
            answered = all(answer.startswith(b"HTTP/1.1 200 ") and b"\nverbatim_unreadable 1\n" in answer for answer in answers)
            return answered and len(scrapes) < 4

        self.assertTrue(all_are_answered() or all_are_answered())  # a test that waits long for a processor may lose a client

    def test_OtherRequests_AreRefused(self):
        port = self.start_exporter()
        status, page = self.get(port, "/")
        self.assertEqual((status, page.count('"/metrics"')), (200, 1))
        self.assertEqual(self.get(port, "/metrics?x=1")[0], 200)
        for path in ("/other", "/metrics/", "//", "/%00", "*"):
            self.assertEqual(self.get(port, path)[0], 404, path)
        for path, size in (("/", len(page)), ("/metrics", len(self.get(port, "/metrics")[1]))):
            head, _, body = self.exchange(port, f"HEAD {path} HTTP/1.1\r\n\r\n".encode()).partition(b"\r\n\r\n")
            self.assertRegex(head, rb"^HTTP/1\.1 200 ")
            self.assertIn(b"\r\nContent-Length: %d\r\n" % size, head + b"\r\n")
            self.assertEqual(body, b"")
        for method in (b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH"):
            answer = self.exchange(port, method + b" /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nab")
            self.assertRegex(answer, rb"^HTTP/1\.1 405 ")
            self.assertIn(b"\r\nAllow: GET, HEAD\r\n", answer)
        self.assertRegex(self.exchange(port, b"CONNECT other:80 HTTP/1.1\r\n\r\n"), rb"^HTTP/1\.1 405 ")
        self.assertRegex(self.exchange(port, b"NONE /metrics HTTP/1.1\r\n\r\n"), rb"^HTTP/1\.1 [45]\d\d ")
        self.assertRegex(self.exchange(port, b"nonsense\r\n\r\n"), rb"^HTTP/1\.\d 400 ")
        answer = self.exchange(port, b"GET /metrics HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        self.assertIn(b"\r\nContent-Type: text/plain; version=0.0.4", answer)
        self.assertEqual(re.findall(rb"\r\nConnection: (.*)\r\n", answer), [b"close"])

    def test_TooLongRequests_AreRefused(self):
        port = self.start_exporter()
        for endless in (b"GET /", b"GET /metrics HTTP/1.1\r\nName: ", b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 2000):
            with self.subTest(endless=endless[:30]), contextlib.suppress(ConnectionError):
                client = self.connect(port, endless)
                client.sendall(b"x" * 2**22)
                self.assertFalse(self.read_until_closed(client).startswith(b"HTTP/1.1 200"))
        answer = self.exchange(port, b"GET /metrics HTTP/1.1\r\nName: " + b"x" * 9000 + b"\r\n\r\n")
        self.assertRegex(answer, rb"^HTTP/1\.1 400 ")
        answer = self.exchange(port, b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
        self.assertRegex(answer, rb"^HTTP/1\.1 413 ")
        self.assertEqual(self.values(port, "verbatim_up"), {(): 1})

    def test_SecondRequestOfAConnection_IsNotAnswered(self):
        port = self.start_exporter()
        answer = self.exchange(port, b"GET / HTTP/1.1\r\n\r\n" * 2)
        self.assertLessEqual(answer.count(b"HTTP/1.1 200 "), 1)

    def test_HalfClosedConnection_IsAnswered(self):
        self.serve_long_text()
        port = self.start_exporter()
        client = self.connect(port, REQUEST, receive_bytes=65536)
        client.shutdown(socket.SHUT_WR)
        head, _, text = self.read_until_closed(client).partition(b"\r\n\r\n")
        self.assertRegex(head, rb"\r\nContent-Length: %d\r\n" % len(text))

    def test_LabelsAndNumbers_AreExact(self):
        queue = rma_queue(1, 0, 1, 1)
        queue["peer_host"] = HOSTILE_LABEL
        queue["completed"]["put_bytes"] = 2**53 - 1
        queue["no_progress_ms"] = 1234
        self.serve(lambda reading: [rma_set(1, 0, [queue])])
        port = self.start_exporter()
        for name, expected in (("put_bytes_total", 2**53 - 1), ("no_progress_seconds", 1.234), ("puts_total", 10)):
            (found,) = [one for one in self.rma_metrics(port) if one[0] == name]
            self.assertEqual((found[1]["peer_host"], found[2]), (HOSTILE_LABEL, expected), name)
        self.assertIn("} 9007199254740991\n", self.get(port, "/metrics")[1])

    def test_Addresses_AreOfBothFamilies(self):
        port = self.start_exporter(listen="[::1]:0")
        self.assertEqual(self.get(port, "/", host="::1")[0], 200)
        for address in ("9477", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "[::1]", "localhost:0", "", ":", "127.0.0.1:1x", "127.0.0.1:1:9477",
                        "[::1]:1:9477"):
            done = subprocess.run([OPTIONS.exporter, "--listen", address], env=environment(self.directory), capture_output=True,
                                  text=True, timeout=TIMEOUT_S)
            self.assertEqual(done.returncode, 2, address)
            self.assertIn(f"'{address}' is no address and port. Next: ", done.stderr)

    def devices(self, port):
        """{(process, user): devices}"""
        found = {}
        for name, labels, _ in self.metrics(port):
            if name == "verbatim_bytes_total":
                found.setdefault((labels["process"], int(labels["user"])), set()).add(labels["device"])
        return found

    def serve_hostile(self, names):
        state = json.dumps(state_of(program="hostile", connections=[receiver(1, "hostile0:1")])).encode()
        return self.serve_as_another_user(names, state)

    def test_SocketsOfAnotherUser_RemoveNoSeries(self):
        ranks = self.start_job()
        directory = self.serve_hostile(numbered(100))
        port = self.start_exporter("--dir", directory, "--dir", self.directory, "--max-processes", "20")

        def shown():
            devices = self.devices(port)
            own = {int(process.split("-")[0]) for process, user in devices if user == os.geteuid()}
            return len(devices), own, self.values(port, "verbatim_processes_not_shown")

        self.eventually(lambda: shown() == (20, set(ranks), {(): 82}))

    def test_ProcessOfAnotherUserWithTheSameName_IsAnotherProcess(self):
        self.start_job()
        directory = self.serve_hostile([os.path.basename(path) for path in self.sockets()])
        port = self.start_exporter("--dir", directory, "--dir", self.directory)

        def devices_of_four():
            devices = self.devices(port)
            return devices if len(devices) == 4 else None

        for _ in range(2):
            for (process, user), shown in self.eventually(devices_of_four).items():
                self.assertEqual(shown, {"softverbs0:1"} if user == os.geteuid() else {"hostile0:1"}, process)
            before = self.get(port, "/metrics")
            self.eventually(lambda before=before: self.get(port, "/metrics") != before)

    def test_SeriesOfAUser_AreLimitedTogether(self):
        self.serve_long_text(processes=30)
        port = self.start_exporter()
        self.eventually(lambda: self.values(port, "verbatim_processes_not_shown")[()] > 10)

    def test_Address_IsLoopbackWithoutAnOption(self):
        done = subprocess.run([OPTIONS.exporter, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertIn("ADDRESS:PORT=127.0.0.1:", done.stdout)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            done = subprocess.run([OPTIONS.exporter, "--listen", address], env=environment(self.directory), capture_output=True,
                                  text=True, timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 3)
        self.assertIn(f"verbatim-exporter: listening at {address}: bind: Address already in use. Next: --listen with", done.stderr)


class Prometheus(Exporter):
    """Prometheus itself scrapes the exporter."""

    def setUp(self):
        super().setUp()
        if not shutil.which("prometheus"):
            missing = "the program prometheus is missing. Next: tools/setup --full"
            self.fail(missing) if os.environ.get("PROGRAMS_REQUIRED") == "1" else self.skipTest(missing)

    def query(self, port, expression):
        status, text = self.get(port, "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        self.assertEqual(status, 200, text)
        return json.loads(text)["data"]["result"]

    def start_prometheus(self, exporter):
        """Returns its port."""
        scratch = os.path.dirname(self.directory)
        with open(f"{scratch}/prometheus.yml", "w", encoding="utf-8") as file:
            file.write(f"scrape_configs: [{{job_name: verbatim, scrape_interval: 1s, scrape_timeout: 1s, "
                       f"static_configs: [{{targets: ['127.0.0.1:{exporter}']}}]}}]\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        prometheus = subprocess.Popen(
            ["prometheus", f"--config.file={scratch}/prometheus.yml", f"--storage.tsdb.path={scratch}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(prometheus.wait, TIMEOUT_S)
        self.addCleanup(prometheus.terminate)
        return port

    def test_Scrapes_TheJobsRates_AndItsEnd(self):
        ranks = self.start_job()
        port = self.start_prometheus(self.start_exporter())

        def rates():
            try:
                found = self.query(port, "rate(verbatim_bytes_total[10s]) > 0")
            except (ConnectionError, AssertionError):  # it is starting
                return None
            return found if len(found) == 4 else None

        found = self.eventually(rates)
        self.assertEqual({int(series["metric"]["process"].split("-")[0]) for series in found}, set(ranks))
        self.assertEqual({series["metric"]["direction"] for series in found}, {"send", "recv"})
        self.assertEqual([series["value"][1] for series in self.query(port, "up")], ["1"])
        self.end_job()
        self.eventually(lambda: self.query(port, "verbatim_connections") == [])
        self.assertEqual([series["value"][1] for series in self.query(port, "verbatim_processes")], ["0"])

    def test_LabelsNumbersAndHistograms_AreReadAsTheyAre(self):
        queue = rma_queue(1, 0, 1, 1)
        queue["peer_host"] = HOSTILE_LABEL
        queue["completed"]["put_bytes"] = 2**53 - 1
        connections = [receiver(1, "a:1", latency={"cts_to_data": [[1000, 3], [3000000, 4], [9000000000, 5]]})]
        self.serve_bytes(lambda reading: json.dumps(state_of(reading, rma=[rma_set(1, 0, [queue])], connections=connections)).encode())
        port = self.start_prometheus(self.start_exporter())

        def shown(expression):
            with contextlib.suppress(ConnectionError, AssertionError):  # it is starting
                found = self.query(port, expression)
                return [(series["metric"].get("peer_host"), float(series["value"][1])) for series in found] or None
            return None

        self.assertEqual(self.eventually(lambda: shown("verbatim_rma_put_bytes_total")), [(HOSTILE_LABEL, 2**53 - 1)])
        for bound, count in (("1e-06", 3), ("0.002048", 3), ("0.004096", 7), ("1.048576", 7), ("+Inf", 12)):
            self.assertEqual(shown(f'verbatim_latency_seconds_bucket{{le="{bound}"}}'), [(None, count)], bound)
        self.assertEqual(shown("verbatim_latency_seconds_count"), [(None, 12)])
        self.assertAlmostEqual(shown("verbatim_latency_seconds_sum")[0][1], 3 * 1e-6 + 4 * 3e-3 + 5 * 9)


# Its own case only: the inherited ones run once.
for name in [name for name in dir(Exporter) if name.startswith("test_")]:
    setattr(Prometheus, name, None)


def run_case(name):
    return subprocess.run([sys.executable, *sys.argv, "--jobs=1", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def run_in_processes(class_name):
    """Most of the time of the cases is waiting."""
    names = unittest.defaultTestLoader.getTestCaseNames(globals()[class_name])
    sys.argv.remove(class_name)
    with multiprocessing.pool.ThreadPool(OPTIONS.jobs) as pool:
        ended = pool.map(run_case, [f"{class_name}.{name}" for name in names], chunksize=1)
    for one in ended:
        sys.stdout.write(one.stdout.decode(errors="replace"))
    sys.exit(any(one.returncode for one in ended))


if __name__ == "__main__":
    if OPTIONS.jobs > 1:
        run_in_processes(*CASES)
    unittest.main(argv=[sys.argv[0], *CASES], verbosity=2)
