#!/usr/bin/env python3
"""verbatim-top and verbatim-exporter with running processes of verbatim-perf over softverbs: live_test.py OPTIONS CASES..."""

import argparse
import http.client
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse

PARSER = argparse.ArgumentParser()
for option in ("top", "perf", "plugin", "launcher", "verbs", "page", "exporter"):
    PARSER.add_argument(f"--{option}")
OPTIONS, CASES = PARSER.parse_known_args()
TIMEOUT_S = 60
SERIES = re.compile(r'^(\w+)(?:\{((?:\w+="[^"]*",?)*)\})? (\S+)$')
LABEL = re.compile(r'(\w+)="([^"]*)"')
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


class Live(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = f"{scratch.name}/state"
        self.job = None

    def start_job(self, **settings):
        """Two ranks that send to each other until the test ends. Returns their IDs."""
        self.start_perf("sendrecv", **settings)
        return self.eventually(lambda: self.running_ranks())

    def start_perf(self, operation, *arguments, **settings):
        command = perf("-b", "64K", "-e", "64K", "-n", "100000000", "--timeout", "60", *arguments, operation=operation)
        self.job = subprocess.Popen(command, env=environment(self.directory, **settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(self.end_job)

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


class Top(Live):
    def test_RunningJob_AllConnectionsHaveRatesAndPeers(self):
        ranks = self.start_job()
        view = self.top("--sort", "pid")
        self.assertEqual(view["schema"], 1)
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
                         "look_first_at[].host", "look_first_at[].pid", "look_first_at[].waiting"})
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
            self.assertEqual(list(json.load(file).items())[0], ("schema", 1))

    def test_Puts_AreInTheStateAndThePageExplainsEveryField(self):
        self.start_perf("alltoall_put", "--contexts", "2")

        def busy():
            states = [read_state(path) for path in self.sockets()] if os.path.isdir(self.directory) else []
            found = len(states) == 2 and all(state["rma"] and len(state["rma"][0]["queues"]) >= 2 for state in states)
            return states if found else None

        for state in self.eventually(busy):
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
        self.assertEqual(len(self.top()["processes"]), 2)
        self.assertEqual(self.top()["problems"], [])

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
        self.assertEqual([(entry["pid"], entry["waiting"]) for entry in view["look_first_at"]], [(ranks[0], 1)])
        self.assertIn("does not answer", view["problems"][0]["why"])
        connections = view["processes"][0]["connections"]
        self.assertTrue(any(connection["stalled"] and connection["waits_for"] == "peer" for connection in connections), connections)
        self.assertTrue(fields(view) >= {"problems[].path", "look_first_at[].waiting"})
        text = self.run_top("--stall", "2")
        self.assertRegex(text, rf"(?m)^! look first at process {ranks[0]} on \S+: 1 process waits for it$")
        self.assertRegex(text, rf"(?m)^! +receives from +\S+:{ranks[0]} .*peer \S+:{ranks[0]} for \d+ s$")

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

    def test_NoTerminalOrNoDirectory_IsNamed(self):
        for directory, arguments, reason in ((self.directory, [], "there is no terminal"), ("none", ["--once"], "VERBATIM_STATE_DIR is none")):
            done = subprocess.run([OPTIONS.top, *arguments], env=environment(directory), stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=TIMEOUT_S)
            self.assertEqual(done.returncode, 3)
            self.assertIn(reason, done.stderr)


class Exporter(Live):
    def start_exporter(self, *arguments):
        command = [OPTIONS.exporter, "--listen", "127.0.0.1:0", *arguments]
        exporter = subprocess.Popen(command, env=environment(self.directory), stdout=subprocess.PIPE, text=True)

        def end():
            exporter.terminate()
            self.assertEqual(exporter.wait(TIMEOUT_S), 0)
            exporter.stdout.close()

        self.addCleanup(end)
        return int(re.search(r"port (\d+)", exporter.stdout.readline())[1])

    def get(self, port, path):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self, port):
        """[(name, labels, value)]; every line has the form that Prometheus documents."""
        status, text = self.get(port, "/metrics")
        self.assertEqual(status, 200)
        series, types = [], {}
        for line in text.splitlines():
            if line.startswith("#"):
                _, keyword, name, rest = line.split(" ", 3)
                self.assertIn(keyword, ("HELP", "TYPE"))
                if keyword == "TYPE":
                    self.assertNotIn(name, types)
                    types[name] = rest
                continue
            found = SERIES.match(line)
            self.assertTrue(found, line)
            if found[1].startswith("verbatim_"):
                histogram = re.fullmatch(r"(verbatim_latency_seconds)_(bucket|count|sum)", found[1])
                kind = "histogram" if histogram else "counter" if found[1].endswith("_total") else "gauge"
                self.assertEqual(types[histogram[1] if histogram else found[1]], kind)
                series.append((found[1], dict(LABEL.findall(found[2] or "")), float(found[3])))
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
        time.sleep(0.3)
        after = self.values(port, "verbatim_bytes_total")
        for labels, value in before.items():
            self.assertGreater(after[labels], value)
        for direction, names in LATENCIES.items():
            for rank in ranks:
                found = {labels["latency"]: value for name, labels, value in self.metrics(port) if name == "verbatim_latency_seconds_count"
                         and labels["process"].startswith(f"{rank}-") and labels["direction"] == direction}
                self.assertEqual(set(found), names)
                self.assertTrue(all(found.values()), found)
        shown = {re.sub("_(bucket|count|sum)$", "", name) for name, _, _ in self.metrics(port)}
        self.assertEqual(shown | {"verbatim_port_counter_total"}, explained("Metrics of verbatim-exporter"))

    def test_EndedProcesses_HaveNoSeriesAnyMore(self):
        self.start_job()
        port = self.start_exporter()
        self.assertEqual(self.values(port, "verbatim_processes"), {(): 2})
        self.end_job()
        self.assertEqual(self.values(port, "verbatim_processes"), {(): 0})
        self.assertEqual([name for name, labels, _ in self.metrics(port) if "process" in labels], [])

    def test_MoreProcessesThanAllowed_AreOnlyCounted(self):
        self.start_job()
        port = self.start_exporter("--max-processes", "1")
        self.assertEqual(self.values(port, "verbatim_processes"), {(): 2})
        self.assertEqual(self.values(port, "verbatim_processes_not_shown"), {(): 1})
        self.assertEqual(len({labels["process"] for _, labels, _ in self.metrics(port) if "process" in labels}), 1)

    def test_Address_IsLoopbackUnlessToldOtherwise(self):
        done = subprocess.run([OPTIONS.exporter, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S)
        self.assertIn("ADDRESS:PORT=127.0.0.1:", done.stdout)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            done = subprocess.run([OPTIONS.exporter, "--listen", address], env=environment(self.directory), capture_output=True,
                                  text=True, timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 3)
        self.assertIn(f"listening at {address}", done.stderr)


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

    def test_Scrapes_TheJobsRates_AndItsEnd(self):
        ranks = self.start_job()
        exporter = self.start_exporter()
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


# Its own case only: the inherited ones run once.
for name in [name for name in dir(Exporter) if name.startswith("test_")]:
    setattr(Prometheus, name, None)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *CASES], verbosity=2)
