#!/usr/bin/env python3
# Programs without a sanitizer's runtime load neither the plugin nor softverbs with one.
#: test verbatim-info suite=tools needs=softverbs_mlx5 args='{verbatim_info} {softverbs} {source}/plugin/README.md'
#:   when sanitizer=none args='{plugin} {source}/tools/softverbs {socket_plugin}' needs=softverbs_files
"""usage: info_test.py TOOL VERBS_LIBRARY PLUGIN_README [PLUGIN LAUNCHER SOCKET_PLUGIN]
Runs verbatim-info over softverbs. With PLUGIN, its exit status is compared with init of the plugin in the same
environment."""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

TOOL, VERBS_LIBRARY, README, *OTHERS = sys.argv[1:]
PLUGIN, LAUNCHER, SOCKET_PLUGIN = OTHERS or (None, None, None)
TIMEOUT_S = 60


class NetTable(ctypes.Structure):
    """How ncclNetPlugin_v8 begins."""

    _fields_ = [("name", ctypes.c_char_p), ("init", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p))]


def environment(settings):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERBATIM_", "NCCL_"))}
    return {**kept, "NCCL_CONF_FILE": "/dev/null", "VERBATIM_VERBS_LIBRARY": VERBS_LIBRARY, "VERBATIM_SOCKET_IFNAME": "lo", **settings}


def run(command, settings):
    return subprocess.run(command, env=environment(settings), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def init_plugin(settings):
    """The exit status that the tool should have, and what the plugin logs, in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, sys.stderr.fileno())
        os.environ.clear()
        os.environ.update(environment(settings))
        os._exit(NetTable.in_dll(ctypes.CDLL(PLUGIN), "ncclNetPlugin_v8").init(None) != 0)
    os.close(writer)
    with open(reader, encoding="utf-8") as log:
        text = log.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def shown_values(value, key=None):
    """The texts and numbers of the JSON object that people see too."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield from shown_values(member, name)
    elif isinstance(value, list):
        for member in value:
            yield from shown_values(member, key)
    elif value is not None and not isinstance(value, bool) and key not in ("schema", "origin"):
        yield str(value)


class Info(unittest.TestCase):
    maxDiff = None

    def info(self, *arguments, **settings):
        """The JSON object. Checks the exit status, and that the text says the same."""
        result = run([TOOL, "--json", *arguments], settings)
        self.assertEqual(result.stderr, "")
        report = json.loads(result.stdout)
        self.assertEqual(result.returncode, 0 if report["init"]["succeeds"] else 1, result.stdout)
        text = run([TOOL, *arguments], settings)
        self.assertEqual((text.returncode, text.stderr), (result.returncode, ""))
        for value in shown_values(report):
            self.assertIn(value, text.stdout)
        if PLUGIN:
            status, log = init_plugin(settings)
            self.assertEqual(status, result.returncode, log)
            for warning in report["init"]["warnings"][:1]:  # the plugin ends at the first
                self.assertEqual(log, f"verbatim: {warning}\n")
        return report

    def port(self, report, device=0):
        (port,) = report["devices"][device]["ports"]
        return port

    def test_one_device_is_used(self):
        report = self.info()
        self.assertEqual(list(report)[0], "schema")
        self.assertEqual(report["schema"], 1)
        self.assertEqual(report["init"], {"succeeds": True, "usable_ports": 1, "warnings": []})
        self.assertEqual(report["libraries"]["libibverbs"], {"path": os.path.realpath(VERBS_LIBRARY), "version": "1"})
        self.assertEqual(report["side_channel"]["interface"], "lo")
        self.assertEqual(report["side_channel"]["chosen_by"], "VERBATIM_SOCKET_IFNAME")
        self.assertTrue(report["side_channel"]["loopback"])
        (device,) = report["devices"]
        self.assertEqual(device["name"], "softverbs0")
        self.assertEqual(device["limits"]["qps"], 8192)
        self.assertEqual((device["gpu_memory"]["dma_buf"], device["gpu_memory"]["peer_memory"]), (False, False))
        self.assertIn("the device has no kernel driver", device["gpu_memory"]["reason"])
        port = self.port(report)
        self.assertEqual(
            [port[name] for name in ("used", "nccl_name", "state", "link_layer", "speed_mbps", "mtu", "max_message_bytes")],
            [True, "verbatim_softverbs0", "ACTIVE", "RoCE", 100000, 4096, 1 << 30],
        )
        self.assertEqual([(gid["index"], gid["type"], gid["taken"]) for gid in port["gids"]],
                         [(0, "RoCE v1", False), (1, "RoCE v2", False), (2, "RoCE v1", False), (3, "RoCE v2", True)])
        self.assertEqual(port["gids"][3]["gid"], "::ffff:10.77.0.1")
        self.assertEqual(port["gids"][3]["why"], "its address is routable")
        with open(README, encoding="utf-8") as readme:
            table = readme.read().partition("<!-- variables:begin -->")[2].partition("<!-- variables:end -->")[0]
        variables = re.findall(r"^\| `(VERBATIM_\w+)` \|", table, re.M)
        self.assertEqual([setting["name"] for setting in report["settings"]], variables)
        self.assertEqual({setting["name"] for setting in report["settings"] if setting["origin"] != "default"},
                         {"VERBATIM_VERBS_LIBRARY", "VERBATIM_SOCKET_IFNAME"})
        self.assertEqual(report["unused_variables"], [])
        self.assertNotIn("forecast", report)

    def test_data_direct_is_shown(self):
        settings = {
            "SOFTVERBS_DATA_DIRECT": "5356:41:00.0",
            "SOFTVERBS_DEVICES": "2",
            "SOFTVERBS_DMABUF": "1",
            "VERBATIM_MLX5_LIBRARY": os.path.join(os.path.dirname(VERBS_LIBRARY), "libmlx5.so.1"),
        }
        for setting, expected in (("0", [""]), ("1", ["_dma"]), ("2", ["", "_dma"])):
            report = self.info(**settings, NCCL_IB_DATA_DIRECT=setting)
            first, second = report["devices"]
            path = None if setting == "0" else "/sys/devices/pci5356:41/5356:41:00.0"
            self.assertEqual(first["data_direct"], path)
            self.assertIsNone(second["data_direct"])
            self.assertEqual(
                sorted(port["nccl_name"] for port in first["ports"]), ["verbatim_softverbs0" + suffix for suffix in expected]
            )
            self.assertEqual([port["nccl_name"] for port in second["ports"]], ["verbatim_softverbs1"])
            self.assertEqual(report["init"]["usable_ports"], len(expected) + 1)

    def test_infiniband_takes_entry_0(self):
        port = self.port(self.info(SOFTVERBS_LINK_LAYER="ib"))
        self.assertEqual((port["link_layer"], port["lid"]), ("InfiniBand", 1))
        self.assertEqual([gid["why"] for gid in port["gids"] if gid["taken"]], ["InfiniBand: entry 0 unless one has an FLID"])

    def test_no_device_fails(self):
        report = self.info(SOFTVERBS_DEVICES="0")
        self.assertFalse(report["init"]["succeeds"])
        self.assertEqual(report["devices"], [])
        self.assertIn("finds no device", report["init"]["warnings"][0])

    def test_no_library_fails(self):
        report = self.info(VERBATIM_VERBS_LIBRARY="/nowhere/libibverbs.so.1")
        self.assertFalse(report["init"]["succeeds"])
        self.assertIsNone(report["libraries"]["libibverbs"])

    def test_port_down_is_not_used(self):
        report = self.info(SOFTVERBS_DEVICES="2", SOFTVERBS_FAULTS="link-down device=0")
        self.assertTrue(report["init"]["succeeds"])
        down, up = self.port(report, 0), self.port(report, 1)
        self.assertEqual((down["used"], down["reason"], down["state"]), (False, "port is DOWN", "DOWN"))
        self.assertIn("check the cable", down["next"])
        self.assertEqual(sum(gid["taken"] for gid in down["gids"]), 1)
        self.assertEqual((up["used"], up["nccl_name"]), (True, "verbatim_softverbs1"))

    def test_only_port_down_fails(self):
        report = self.info(SOFTVERBS_FAULTS="link-down device=0")
        self.assertFalse(report["init"]["succeeds"])
        (warning,) = report["init"]["warnings"]
        self.assertTrue(warning.startswith("no RDMA device is usable. softverbs0:1: port is DOWN. Next: "), warning)

    def test_malformed_hca_fails(self):
        report = self.info(VERBATIM_HCA="softverbs0:x")
        self.assertFalse(report["init"]["succeeds"])
        self.assertIn("VERBATIM_HCA=softverbs0:x is not valid", report["init"]["warnings"][0])

    def test_hca_that_selects_nothing_fails(self):
        report = self.info(NCCL_IB_HCA="mlx5")
        self.assertFalse(report["init"]["succeeds"])
        (device,) = report["devices"]
        self.assertEqual((device["reason"], device["ports"]), ("not selected by NCCL_IB_HCA=mlx5", []))
        self.assertIn("NCCL_IB_HCA", device["next"])

    def test_empty_gid_index_fails(self):
        report = self.info(VERBATIM_GID_INDEX="9")
        self.assertFalse(report["init"]["succeeds"])
        port = self.port(report)
        self.assertRegex(port["reason"],
                         r"^GID 9, set by VERBATIM_GID_INDEX, is empty or does not exist; not empty: 0 fe80::.* \(RoCE v1\), .*3 ")
        self.assertIn("VERBATIM_GID_INDEX", port["next"])
        self.assertEqual([(gid["index"], gid["taken"]) for gid in port["gids"]], [(index, False) for index in range(4)])

    def test_pkey_out_of_the_table_fails(self):
        report = self.info(NCCL_IB_PKEY="7")
        self.assertFalse(report["init"]["succeeds"])
        port = self.port(report)
        self.assertRegex(port["reason"], r"^P_Key index 7, set by VERBATIM_PKEY or NCCL_IB_PKEY, is out of the table, which has \d+ ")
        self.assertIn("unset VERBATIM_PKEY", port["next"])

    def test_settings_have_origins(self):
        report = self.info(NCCL_IB_TIMEOUT="18", NCCL_IB_GID_INDEX="1", VERBATIM_GID_INDEX="2", NCCL_IB_OOO_RQ="1", VERBATIM_HCAS="x")
        self.assertTrue(report["init"]["succeeds"])
        settings = {setting["name"]: setting for setting in report["settings"]}
        self.assertEqual(settings["VERBATIM_TIMEOUT"], {"name": "VERBATIM_TIMEOUT", "value": "18", "origin": "nccl",
                                                        "variable": "NCCL_IB_TIMEOUT", "valid": True})
        self.assertEqual(settings["VERBATIM_GID_INDEX"], {"name": "VERBATIM_GID_INDEX", "value": "2", "origin": "verbatim",
                                                          "variable": "VERBATIM_GID_INDEX", "valid": True,
                                                          "ignored": "NCCL_IB_GID_INDEX"})
        self.assertEqual(settings["VERBATIM_RETRY_CNT"]["value"], "7")
        self.assertEqual(report["unused_variables"], [{"name": "NCCL_IB_OOO_RQ"}, {"name": "VERBATIM_HCAS", "nearest": "VERBATIM_HCA"}])
        self.assertEqual([gid["why"] for gid in self.port(report)["gids"] if gid["taken"]], ["set by VERBATIM_GID_INDEX"])

    def test_dangerous_and_misunderstood_variables_are_warnings(self):
        for settings, line in (
            ({"MLX5_SINGLE_THREADED": "1"}, "MLX5_SINGLE_THREADED=1 removes the locks of libmlx5"),
            ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 disables NCCL's own InfiniBand transport only"),
            ({"VERBATIM_STATS": "/nowhere/stats"}, "writing /nowhere/stats (VERBATIM_STATS) would fail now: No such file or directory"),
        ):
            report = self.info(**settings)
            self.assertTrue(report["init"]["succeeds"])
            self.assertEqual(len(report["init"]["warnings"]), 1, report["init"])
            self.assertTrue(report["init"]["warnings"][0].startswith(line), report["init"])
        report = self.info(NCCL_GIN_IB_TC="106")
        self.assertEqual(report["unused_variables"], [{"name": "NCCL_GIN_IB_TC"}])

    def test_limits_of_gpus_and_control_group_are_shown(self):
        with tempfile.TemporaryDirectory() as root:
            report = self.info("--host-files", root)
            self.assertIsNone(report["limits"]["gpu_bar1_bytes"])
            self.assertIsNone(report["devices"][0]["limits"]["rdma_control_group"])
            files = {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/rdma.max": "other hca_handle=1\nsoftverbs0 hca_handle=2 hca_object=max\n",
                "sys/bus/pci/drivers/nvidia/0000:01:00.0/resource": "0x1000 0x1fff 0x40200\n0x100000000 0x10fffffff 0x14220c\n",
                "sys/bus/pci/drivers/nvidia/0000:02:00.0/resource": "0x0 0x0 0x0\n0x200000000 0x3ffffffff 0x14220c\n",
            }
            for name, text in files.items():
                path = os.path.join(root, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as file:
                    file.write(text)
            report = self.info("--host-files", root)
            self.assertEqual(report["limits"]["gpu_bar1_bytes"], 256 << 20)
            self.assertEqual(report["devices"][0]["limits"]["rdma_control_group"], "hca_handle=2 hca_object=max")
            text = run([TOOL, "--host-files", root], {}).stdout
            self.assertIn(f"smallest BAR1 of the GPUs, bytes: {256 << 20}\n", text)
            self.assertIn("hca_handle=2 hca_object=max", text)

    def test_configuration_file_of_nccl_counts(self):
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            file.write("# of this cluster\nNCCL_IB_TIMEOUT=17\nNCCL_IB_SL=1\nNCCL_IB_HCA=mlx5\n")
            file.flush()
            result = run([TOOL, "--json"], {"NCCL_CONF_FILE": file.name, "NCCL_IB_SL": "2", "NCCL_IB_HCA": "softverbs"})
        self.assertEqual(result.returncode, 0, result.stdout)
        settings = {setting["name"]: setting for setting in json.loads(result.stdout)["settings"]}
        self.assertEqual(settings["VERBATIM_TIMEOUT"], {"name": "VERBATIM_TIMEOUT", "value": "17", "origin": "nccl",
                                                        "variable": "NCCL_IB_TIMEOUT", "file": file.name, "valid": True})
        self.assertEqual(settings["VERBATIM_SL"], {"name": "VERBATIM_SL", "value": "2", "origin": "nccl",
                                                   "variable": "NCCL_IB_SL", "valid": True})

    def test_invalid_values_are_all_named(self):
        report = self.info(VERBATIM_TIMEOUT="99", NCCL_IB_RETRY_CNT="x")
        self.assertFalse(report["init"]["succeeds"])
        self.assertEqual([(setting["name"], setting["next"]) for setting in report["settings"] if not setting["valid"]],
                         [("VERBATIM_TIMEOUT", "set 1 to 31"), ("VERBATIM_RETRY_CNT", "set 0 to 7")])
        self.assertEqual(len(report["devices"]), 1)

    def test_forecast_counts_connections(self):
        forecast = self.info("--ranks", "4", "--channels", "2", VERBATIM_QPS_PER_CONNECTION="4")["forecast"]
        ring, every_peer = forecast["rows"]
        self.assertEqual((ring["pattern"], ring["connections"], ring["qps"]), ("ring", 4, 16))
        self.assertEqual((every_peer["pattern"], every_peer["connections"], every_peer["qps"]), ("every peer", 12, 48))
        self.assertEqual(every_peer["descriptors"] - ring["descriptors"], 8)
        self.assertEqual(every_peer["registered_bytes"], 3 * ring["registered_bytes"])

    def test_forecast_names_what_is_too_little(self):
        forecast = self.info("--ranks", "4", "--channels", "2", SOFTVERBS_MAX_QP="15")["forecast"]
        ring, every_peer = forecast["rows"]
        self.assertNotIn("next", ring)
        self.assertEqual((every_peer["qps"] + every_peer["flush_qps"], every_peer["next"]),
                         (18, "use more devices, or fewer QPs or channels"))

    def test_no_plugin_is_found(self):
        nccl = json.loads(run([TOOL, "--json"], {"NCCL_NET": "Verbatim"}).stdout)["nccl"]
        self.assertEqual([plugin["entry"] for plugin in nccl["plugins"]], ["libnccl-net.so"])
        self.assertIn("cannot open", nccl["plugins"][0]["error"])
        self.assertFalse(nccl["takes_verbatim"])
        self.assertIn("NCCL_NET_PLUGIN=verbatim", nccl["next"])

    @unittest.skipUnless(PLUGIN, "softverbs with a sanitizer")
    def test_plugin_is_found_as_nccl_finds_it(self):
        nccl = self.info(NCCL_NET_PLUGIN="verbatim", LD_LIBRARY_PATH=os.path.dirname(PLUGIN))["nccl"]
        self.assertEqual(nccl["plugins"], [{"entry": "verbatim", "path": PLUGIN, "name": "Verbatim",
                                            "tables": [12, 11, 10, 9, 8, 7, 6], "taken": True}])
        self.assertTrue(nccl["takes_verbatim"])
        self.assertIn("NCCL_NET=Verbatim", nccl["next"])

    @unittest.skipUnless(PLUGIN, "softverbs with a sanitizer")
    def test_other_plugin_shadows_this_one(self):
        plugins = f"{SOCKET_PLUGIN},{PLUGIN}"
        nccl = json.loads(run([TOOL, "--json"], {"NCCL_NET_PLUGIN": plugins}).stdout)["nccl"]
        self.assertEqual([plugin["taken"] for plugin in nccl["plugins"]], [True, False])
        self.assertFalse(nccl["takes_verbatim"])
        self.assertIn("NCCL takes another plugin", nccl["next"])
        nccl = json.loads(run([TOOL, "--json"], {"NCCL_NET_PLUGIN": plugins, "NCCL_NET": "IB"}).stdout)["nccl"]
        self.assertFalse(nccl["takes_verbatim"])
        self.assertIn("another network", nccl["next"])
        nccl = json.loads(run([TOOL, "--json"], {"NCCL_NET_PLUGIN": plugins, "NCCL_NET": "verbatim"}).stdout)["nccl"]
        self.assertEqual([plugin["taken"] for plugin in nccl["plugins"]], [False, True])
        self.assertNotIn("next", nccl)

    def test_no_file_is_written(self):
        with tempfile.TemporaryDirectory() as directory:
            files = {"VERBATIM_STATS": f"{directory}/stats", "VERBATIM_STATE_SOCKET": f"{directory}/none/socket"}
            result = run([TOOL], files)
            self.assertEqual((result.returncode, result.stderr, os.listdir(directory)), (0, "", []))
            self.assertNotIn("warning", result.stdout)  # opening the socket is not tried: its directory does not exist
            for path in files.values():
                self.assertIn(path, result.stdout)

    @unittest.skipUnless(LAUNCHER, "the launcher's library needs a build without sanitizers")
    def test_launcher_gives_the_device_its_files(self):
        result = run([LAUNCHER, "--lib", os.path.dirname(VERBS_LIBRARY), "--", TOOL, "--json"], {"VERBATIM_VERBS_LIBRARY": ""})
        self.assertEqual(result.returncode, 0, result.stderr)
        report = json.loads(result.stdout)
        self.assertEqual(report["libraries"]["libibverbs"]["path"], os.path.realpath(VERBS_LIBRARY))
        self.assertEqual(os.path.dirname(report["libraries"]["libmlx5"]["path"]), os.path.dirname(os.path.realpath(VERBS_LIBRARY)))
        self.assertTrue(report["devices"][0]["pci_path"].startswith("/sys/devices/"))
        self.assertFalse(report["devices"][0]["mlx5"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
