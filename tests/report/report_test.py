#!/usr/bin/env python3
# verbatim-report and a browser.
#: test report suite=report full sanitizer=none timeout=240 args={build} needs=verbatim_perf,plugin,softverbs
"""verbatim-report: pages of statistics and of verbatim-perf's JSON: report_test.py BUILD_DIR."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

BUILD = pathlib.Path(sys.argv[1]).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3"  # the interpreter for which Debian builds its packages
MIB = 1 << 20


def statistics(process, peer, sent, lanes_down=0, outages=None, **changes):
    ends = {"send": (1, 8, sent), "recv": (1, 8, sent // 2)}
    connections = [
        {"direction": way, "device": "mlx5_0:1", "peer": "b&w", "peer_process": peer, "qps": 1, "lanes": 2,
         "lanes_down": lanes_down, "outages": outages or [], "completion": "imm", "messages": messages, "bytes": count}
        for way, (_, messages, count) in ends.items()
    ]
    totals = {way: dict(zip(("connections", "messages", "bytes"), end)) for way, end in ends.items()}
    return {"schema": 1, "host": "b&w", "pid": int(process, 16), "process": process, "totals": totals,
            "connections": connections, **changes}


def run_of(plugin, factor, latency=False):
    rows = [{"bytes": size, "count": size // 4, "time_us": size / 1e3, "algbw_gb_s": factor, "busbw_gb_s": factor, "wrong": 0}
            for size in (1024, MIB)]
    for row in rows if latency else ():
        row["latency_us"] = {"min": 1.0, "p50": 2.0, "p99": 5.0, "p99_9": 9.0}
    return {"operation": "pingpong" if latency else "all_reduce", "memory": "host", "rows": rows,
            "plugin": {"path": "p.so", "name": plugin, "api_version": 12}}


@unittest.skipUnless(subprocess.run([PYTHON, "-c", "import matplotlib"], capture_output=True).returncode == 0, "no matplotlib")
class Report(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.page = self.directory / "page.html"

    def file(self, name, content):
        path = self.directory / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def report(self, *files):
        return subprocess.run([PYTHON, ROOT / "tools/verbatim-report", "-o", self.page, *files], capture_output=True, text=True)

    def made(self, *files):
        done = self.report(*files)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.page.read_text()

    def test_Statistics_PageHasMatrixAndTotals(self):
        page = self.made(self.file("a", statistics("0a", "0b", 3 * MIB)), self.file("b", statistics("0b", "0a", 5 * MIB)))
        self.assertEqual(page.count("<svg"), 1)
        self.assertRegex(page, "<td>b&amp;w:10<td>send<td>1<td>8<td>3 MiB<td>384 KiB")
        self.assertIn("<!-- 5 MiB -->", page)  # the text of a cell: matplotlib writes it beside its glyphs
        self.assertNotIn("lanes down", page)

    def test_LanesDown_AreListed(self):
        page = self.made(self.file("a", statistics("0a", "0b", MIB, lanes_down=1)))
        self.assertRegex(page, "<td>send<td>mlx5_0:1<td>b&amp;w<td>1 of 2")
        self.assertIn("1 processes without statistics", page)

    def test_Latencies_AreDistributionsAndTheSlowestEnds(self):
        content = statistics("0a", "0b", MIB)
        send, receive = content["connections"]
        send["latency"] = {"isend_to_completion": [[2000, 90], [4000, 9], [90000, 1]]}
        receive["latency"] = {"irecv_to_arrival": [[5000, 8]], "cts_to_data": [[3000, 8]]}
        other = statistics("0b", "0a", MIB)  # has received with optional completion only
        other["connections"][1]["latency"] = {"irecv_to_arrival": [], "cts_to_data": []}
        page = self.made(self.file("a", content), self.file("b", other))
        self.assertEqual(page.count("<svg"), 2)
        for text in ("took at most (us)", "isend to completion (100 messages)", "irecv to arrival (8 messages)", "90 %"):
            self.assertIn(f"<!-- {text} -->", page)
        rows = re.findall("<td>b&amp;w:10 (to|from) b&amp;w, mlx5_0:1<td>([^<]*)<td>([^<]*)<td>([^<]*)<td>([^<]*)", page)
        self.assertEqual(rows, [("to", "isend to completion", "100", "2", "4"), ("from", "CTS to data", "8", "3", "3")])

    def test_OutagesOfLanes_AreBarsOverTime(self):
        outages = [{"lane": 2, "begin_ms": 1000, "end_ms": 3000}, {"lane": 1, "begin_ms": 4000, "end_ms": None}]
        page = self.made(self.file("a", statistics("0a", "0b", MIB, outages=outages)), self.file("b", statistics("0b", "0a", MIB)))
        self.assertEqual(page.count("<svg"), 2)
        for text in ("b&amp;w:10 to b&amp;w, mlx5_0:1", "seconds since the first outage"):
            self.assertIn(f"<!-- {text} -->", page)
        self.assertEqual((page.count("<!--  2 -->"), page.count("<!--  1 -->")), (2, 2))  # both directions

    def test_RunsOfTwoPlugins_ShareAPicture(self):
        page = self.made(self.file("v", run_of("Verbatim", 2.0)), self.file("s", run_of("Socket", 1.0)),
                         self.file("p", run_of("Verbatim", 2.0, latency=True)))
        self.assertEqual(page.count("<svg"), 2)
        for text in ("<!-- Verbatim -->", "<!-- Socket -->", "<!-- bus bandwidth (GB/s) -->", "<!-- half a round trip (us) -->"):
            self.assertIn(text, page)

    def test_Pairs_HaveFindingsAndAPictureForEachPort(self):
        links = [{"from": a, "from_port": port, "to": 1 - a, "to_port": port, "error": "no answer" if a and port else "",
                  "latency_us": 2.0, "gb_s": 0 if a and port else 12.25} for a in (0, 1) for port in (0, 1)]
        hosts = [{"name": name, "why_no_port": "", "ports": []} for name in ("b&w[0]", "c[1]")]
        page = self.made(self.file("p", {"schema": 1, "findings": ["c[1] mlx5_1 to <b&w> fails"], "hosts": hosts, "links": links}))
        self.assertIn("<li>c[1] mlx5_1 to &lt;b&amp;w&gt; fails", page)
        self.assertEqual(page.count("<svg"), 2)
        self.assertEqual((page.count("<!-- fails -->"), page.count("<!-- 12.2 -->")), (1, 3))

    def test_Page_NeedsNoOtherFile(self):
        page = self.made(self.file("a", statistics("0a", "0b", MIB)), self.file("v", run_of("Verbatim", 2.0)))
        self.assertEqual(re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page), [])
        self.assertNotIn("<script", page)

    def test_OtherFiles_AreRefusedByName(self):
        for content, cause in (("no json", "no JSON"), ({"a": 1}, "neither"),
                               (statistics("0a", "0b", 1, schema=2), "schema 2")):
            done = self.report(self.file("other", content))
            self.assertEqual(done.returncode, 2)
            self.assertIn("other: ", done.stderr)
            self.assertIn(cause, done.stderr)
        self.assertEqual(self.report().returncode, 2)
        absent = self.report(self.directory / "absent")
        self.assertEqual((absent.returncode, absent.stderr), (2, f"verbatim-report: {self.directory}/absent: No such file or directory\n"))

    def test_PageThatCannotBeWritten_IsAFailure(self):
        self.page = self.directory
        done = self.report(self.file("a", statistics("0a", "0b", MIB)))
        self.assertEqual((done.returncode, done.stderr), (3, f"verbatim-report: {self.directory}: Is a directory\n"))

    def test_FilesOfAJob_MakeAPageThatABrowserShows(self):
        json_file = self.directory / "run.json"
        perf = BUILD / "tools/verbatim-perf/verbatim-perf"
        plugin = BUILD / "plugin/libnccl-net-verbatim.so"
        command = [ROOT / "tools/softverbs", "--lib", BUILD / "src/softverbs/lib", "--", perf, "pingpong", "--plugin", plugin,
                   "-b", "1K", "-e", "64K", "-f", "8", "-n", "5", "--json", json_file]
        settings = {**os.environ, "VERBATIM_STATS": str(self.directory / "stats.%p"), "VERBATIM_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env=settings, check=True, capture_output=True, timeout=60)
        page = self.made(json_file, *self.directory.glob("stats.*"))
        self.assertIn("Latency: pingpong", page)
        self.assertNotIn("without statistics", page)
        browser = shutil.which("chromium")
        if browser is None:
            self.skipTest("chromium is not installed")
        shown = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.directory}/profile", "--dump-dom",
             f"file://{self.page}"], capture_output=True, text=True, timeout=100)
        self.assertEqual(shown.stdout.count("<svg"), 2, shown.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
