#!/usr/bin/env python3
#: all has=ib_read_bw,ib_write_bw,ibv_devices,ibv_devinfo,ibv_rc_pingpong,python3
#:   + FILES_PROBES={files_probe}:{files_probe_fortified} BUNDLED_LIST={bundled_list}
#:   when has=softverbs_control needs=softverbs_control
#: test programs-files-calls args=Calls
#: test programs-files-content args=Content
#: test programs-files-live args=Live
#: test programs-files-pci args=Pci
#: test programs-files-launcher args=Launcher
#: test programs-files-leftovers args=Leftovers
"""The files of the devices in /dev and /sys, as unmodified programs see them.

FILES_PROBES names the programs made of files_probe.c, BUNDLED_LIST the one made of bundled_list.c.
"""

import glob
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

from program_test_case import BUILD, LAUNCHER, LIBRARY, NAMESPACE, ROCE, TIMEOUT_S, ProgramTest, free_port, main

PORT = "/sys/class/infiniband/softverbs0/ports/1"
CONTROL = os.path.join(BUILD, "tools/softverbs-control/softverbs-control")


def trees(part):
    """The trees of devices with this part number."""
    found = []
    for tree in glob.glob(f"/dev/shm/files-of-softverbs-{os.geteuid()}-*"):
        try:
            number = pathlib.Path(tree, "sys/devices/pci5356:01/5356:01:00.0/device").read_text(encoding="ascii")
        except OSError:
            continue  # being made or removed
        if int(number, 16) == part and ".new." not in tree:
            found.append(tree)
    return found


class FilesTest(ProgramTest):
    def shell(self, script, **settings):
        result = self.run_alone("sh", "-ec", script, **settings)
        self.assertEqual(result.status, 0, result)
        return result.output.splitlines()

    def python(self, script, **settings):
        result = self.run_alone("python3", "-c", "import glob, json, os, pathlib\n" + script, **settings)
        self.assertEqual(result.status, 0, result)
        return json.loads(result.output)

    def counters(self):
        """The counters of softverbs0."""
        script = f"""
files = glob.glob("{PORT}/*counters/*")
print(json.dumps({{os.path.basename(name): int(pathlib.Path(name).read_text()) for name in files}}))"""
        return self.python(script)

    def hold_device(self):
        """Starts a process that keeps softverbs0 open, and waits until it does."""
        arguments = ["ibv_rc_pingpong", "-g", "3", "-p", str(free_port())]
        child, _ = self.start(arguments, {})
        command = [LAUNCHER, "--namespace", NAMESPACE, "stats", "--json", str(child.pid)]
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if self.control(command).returncode == 0:
                return child
            time.sleep(0.05)
        self.fail("the process has not opened its device")

    def control(self, command):
        if not os.path.exists(CONTROL):
            self.skipTest("softverbs-control is not built")
        environment = {**os.environ, "SOFTVERBS_BUILD_DIR": BUILD}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    def cause(self, clauses):
        result = self.control([LAUNCHER, "--namespace", NAMESPACE, "fault", clauses])
        self.assertEqual(result.returncode, 0, result.stderr)


class Calls(FilesTest):
    """The functions of libc that take a path."""

    def test_each_function(self):
        for probe in os.environ["FILES_PROBES"].split(":"):
            for device in ("0", "2"):
                result = self.run_alone(probe, "calls", device, SOFTVERBS_DEVICES="3")
                self.assertEqual((result.status, result.output), (0, "right\n"))

    def test_threads_and_forked_children(self):
        probe = os.environ["FILES_PROBES"].split(":")[0]
        result = self.run_alone(probe, "threads", "0")
        self.assertEqual((result.status, result.output), (0, "right\n"))


class Content(FilesTest):
    def test_files_agree_with_the_verbs(self):
        for layer, link, gid_type in (("roce", "Ethernet", "RoCE v2"), ("ib", "InfiniBand", None)):
            lines = self.shell(
                f"""cd {PORT}; cat state phys_state link_layer rate pkeys/0 gids/0 ../../node_guid ../../node_type
                cat gid_attrs/types/0""",
                SOFTVERBS_LINK_LAYER=layer,
                SOFTVERBS_SPEED_GBPS="200",
            )
            expected = ["4: ACTIVE", "5: LinkUp", link, "200 Gb/sec (4X HDR)", "0xffff"]
            expected += ["fe80:0000:0000:0000:0253:5654:fffe:0001", "0253:5654:fffe:0001", "1: CA", "IB/RoCE v1"]
            self.assertEqual(lines, expected)
            shown = self.run_alone("cat", f"{PORT}/gid_attrs/types/3", SOFTVERBS_LINK_LAYER=layer)
            self.assertEqual(shown.output.strip() == gid_type, layer == "roce", shown)
            shown = self.run_alone("cat", f"{PORT}/gid_attrs/ndevs/0", SOFTVERBS_LINK_LAYER=layer)
            self.assertEqual(shown.output == "lo\n", layer == "roce", shown)

    def test_rate_of_each_port(self):
        lines = self.shell(
            "cat /sys/class/infiniband/*/ports/1/rate", SOFTVERBS_DEVICES="3", SOFTVERBS_SPEED_GBPS="100,25"
        )
        self.assertEqual(lines, ["100 Gb/sec (4X EDR)", "25 Gb/sec (1X EDR)", "25 Gb/sec (1X EDR)"])

    def test_names_of_the_verbs_exist(self):
        listed = self.shell("ibv_devices; ls /sys/class/infiniband /dev/infiniband", SOFTVERBS_DEVICES="16")
        for device in range(16):
            self.assertEqual(listed.count(f"softverbs{device}"), 1)
            self.assertEqual(listed.count(f"uverbs{device}"), 1)
        (ibdev, dev) = self.shell("cat /sys/class/infiniband_verbs/uverbs0/ibdev /sys/class/infiniband_verbs/uverbs0/dev")
        self.assertEqual((ibdev, dev), ("softverbs0", "231:192"))

    def test_device_node_is_a_character_device(self):
        (line,) = self.shell("test -c /dev/infiniband/uverbs0; test -w /dev/infiniband/uverbs0; ls -l /dev/infiniband/uverbs0")
        self.assertRegex(line, r"^crw-rw-rw-.* 231, +192 .* /dev/infiniband/uverbs0$")

    def test_types_in_the_directory_of_nodes(self):
        self.assertEqual(
            sorted(self.shell("find /dev/infiniband -type c", SOFTVERBS_DEVICES="2")),
            ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"],
        )
        self.assertEqual(self.shell("find /dev/infiniband -type l"), [])

    def test_tools_that_walk_directories(self):
        found = self.shell("find -L /sys/class/infiniband -maxdepth 2 -name node_guid; grep -r . /sys/class/infiniband_verbs/abi_version")
        self.assertEqual(found, ["/sys/class/infiniband/softverbs0/node_guid", "6"])
        self.assertIn("0", self.shell(f"grep -rh . {PORT}/counters/"))

    def test_programs_that_a_program_starts(self):
        self.assertEqual(self.shell(f"cd {PORT}; env cat state; (cd gids; pwd; sh -c 'exec cat 2')")[0], "4: ACTIVE")
        self.assertEqual(
            self.shell(f"cd {PORT}; (cd gids; pwd; sh -c 'exec cat 2')"),
            [f"{PORT}/gids", "0000:0000:0000:0000:0000:ffff:0a4d:0001"],
        )

    def test_without_devices_directories_are_empty(self):
        for settings in ({"SOFTVERBS_DEVICES": "0"}, {"SOFTVERBS_MTU": "5"}):
            self.assertEqual(self.shell("ls /sys/class/infiniband /dev/infiniband | grep -c verbs || true", **settings), ["0"])

    def test_modules_for_gpu_memory_are_hidden(self):
        self.shell("! test -e /sys/module/nvidia_peermem; ! test -e /sys/kernel/mm/memory_peers")
        self.shell("test -d /sys/module/nvidia_peermem; test -d /sys/class/infiniband/softverbs0/device/driver",
                   SOFTVERBS_GPU_MEMORY="peer-memory")
        if os.path.exists("/proc/modules"):
            with open("/proc/modules", encoding="ascii") as modules:
                names = [line.split()[0] for line in modules]
            shown = self.shell("cut -d' ' -f1 /proc/modules; exec 3</proc/modules; readlink /proc/self/fd/3")
            kept = [name for name in names if name not in ("nvidia_peermem", "nv_peer_mem")]
            self.assertEqual(shown[:-1], kept)
            if kept == names:
                self.assertEqual(shown[-1], "/proc/modules")


class Live(FilesTest):
    """Files whose content changes while programs run."""

    def test_counters_move(self):
        self.hold_device()  # the counters begin at 0 when no process of the namespace is left
        self.assertEqual(set(self.counters().values()), {0, 10})  # lifespan is 10
        arguments = ["-d", "softverbs0", *ROCE, "-n", "200", "-s", "65536"]
        self.run_pair("ib_write_bw", *arguments)
        counters = self.counters()
        words, packets = 200 * 65536 // 4, 200 * 65536 // 4096
        for name, value in (
            ("port_xmit_data", words),
            ("port_rcv_data", words),
            ("port_xmit_packets", packets),
            ("port_rcv_packets", packets),
            ("rx_write_requests", 200),
            ("rx_read_requests", 0),
            ("port_rcv_errors", 0),
        ):
            self.assertEqual(counters[name], value, name)
        self.run_pair("ib_read_bw", *arguments)
        counters = self.counters()
        self.assertEqual((counters["port_xmit_data"], counters["rx_read_requests"]), (2 * words, 200))

    def test_counters_of_a_killed_process_remain(self):
        self.hold_device()
        port = str(free_port())
        arguments = ["ib_write_bw", "-d", "softverbs0", *ROCE, "-n", "100000000", "-p", port]
        server, _ = self.start(arguments, {})
        client, _ = self.start([*arguments, "localhost"], {})
        deadline = time.monotonic() + TIMEOUT_S
        while (before := self.counters()["port_xmit_data"]) == 0 and time.monotonic() < deadline:
            if client.poll() is not None:  # the server did not listen yet
                client, _ = self.start([*arguments, "localhost"], {})
            time.sleep(0.1)
        self.assertGreater(before, 0)
        for child in (client, server):
            child.send_signal(signal.SIGKILL)
            child.wait()
        after = self.counters()["port_xmit_data"]
        self.assertGreaterEqual(after, before)
        self.hold_device()  # removes what the killed processes have left
        self.assertEqual(self.counters()["port_xmit_data"], after)

    def test_port_state_follows_faults(self):
        self.hold_device()
        read = f"cat {PORT}/state {PORT}/phys_state"
        self.assertEqual(self.shell(read), ["4: ACTIVE", "5: LinkUp"])
        self.cause("link-down device=0")
        self.assertEqual(self.shell(read), ["1: DOWN", "3: Disabled"])
        self.cause("link-up device=0")
        self.assertEqual(self.shell(read), ["4: ACTIVE", "5: LinkUp"])

    def test_gids_follow_faults(self):
        self.hold_device()
        self.assertEqual(self.run_alone("cat", f"{PORT}/gid_attrs/types/4").status, 1)
        self.cause("gid device=0 index=4 address=10.0.0.9 type=rocev2")
        self.assertEqual(
            self.shell(f"cat {PORT}/gids/4 {PORT}/gid_attrs/types/4"),
            ["0000:0000:0000:0000:0000:ffff:0a00:0009", "RoCE v2"],
        )


class Pci(FilesTest):
    """The PCI device of each device: one of the machine or an invented one."""

    RESOLVE = "realpath /sys/class/infiniband/*/device"

    def check_device(self, path, **settings):
        """What NCCL's topology, UCX and Gloo read of a PCI device."""
        address = os.path.basename(path)
        script = f"""
path = "{path}"
bus = "/sys/class/pci_bus/{address[:7]}/../../{address}"
names = ["class", "vendor", "device", "subsystem_vendor", "subsystem_device", "numa_node", "local_cpus", "max_link_speed",
         "max_link_width"]
print(json.dumps({{
    "files": {{name: pathlib.Path(path, name).read_text().strip() for name in names}},
    "from bus": os.path.realpath(bus),
    "from list": os.path.realpath("/sys/bus/pci/devices/{address}"),
    "listed": "{address}" in os.listdir("/sys/bus/pci/devices"),
    "infiniband": os.listdir("/sys/bus/pci/devices/{address}/infiniband"),
}}))"""
        found = self.python(script, **settings)
        self.assertEqual((found["from bus"], found["from list"]), (path, path))
        self.assertTrue(found["listed"])
        self.assertEqual(len(found["infiniband"]), 1)
        return found["files"]

    def test_invented_devices(self):
        paths = self.shell(self.RESOLVE, SOFTVERBS_DEVICES="2")
        self.assertEqual(paths, ["/sys/devices/pci5356:01/5356:01:00.0", "/sys/devices/pci5356:02/5356:02:00.0"])
        files = self.check_device(paths[1], SOFTVERBS_DEVICES="2", SOFTVERBS_VENDOR_PART_ID="4119")
        self.assertEqual((files["class"], files["device"]), ("0x020000", "0x1017"))
        self.assertNotEqual(files["local_cpus"], "")
        (real, *_) = sorted(os.listdir("/sys/bus/pci/devices")) or [""]
        if real:
            self.assertIn(real, self.shell("ls /sys/bus/pci/devices"))

    def test_functions_of_one_card(self):
        settings = {"SOFTVERBS_DEVICES": "3", "SOFTVERBS_PCI": "0abc:3b:00.0,0abc:3b:00.1"}
        card = "/sys/devices/pci0abc:3b/0abc:3b:00."
        paths = self.shell(self.RESOLVE, **settings)
        self.assertEqual(paths, [card + "0", card + "1", "/sys/devices/pci5356:03/5356:03:00.0"])
        for path in paths:
            self.check_device(path, **settings)
        # NCCL takes the first function for all functions of a card.
        settings = {"SOFTVERBS_PCI": "0abc:3b:02.5"}
        (path,) = self.shell(self.RESOLVE, **settings)
        self.assertEqual(path, "/sys/devices/pci0abc:3b/0abc:3b:02.5")
        self.assertEqual(self.shell(f"cat {card}0/class", **settings), ["0x020000"])

    def test_data_direct_interfaces(self):
        settings = {"SOFTVERBS_DATA_DIRECT": "0abc:41:00.0"}
        (path,) = self.shell("realpath /sys/bus/pci/devices/0abc:41:00.0", **settings)
        self.assertEqual(path, "/sys/devices/pci0abc:41/0abc:41:00.0")
        self.assertEqual(self.shell(f"cat {path}/class; ! test -e {path}/infiniband", **settings), ["0x020000"])
        self.check_device(*self.shell(self.RESOLVE, **settings), **settings)

    def test_device_of_the_machine(self):
        for address in sorted(os.listdir("/sys/bus/pci/devices")) if os.path.isdir("/sys/bus/pci/devices") else []:
            real = os.path.realpath(f"/sys/bus/pci/devices/{address}")
            if not os.path.isdir(os.path.join(real, "infiniband")):
                break
        else:
            self.skipTest("this machine has no PCI device")
        settings = {"SOFTVERBS_PCI": address}
        self.assertEqual(self.shell(self.RESOLVE, **settings), [real])
        for name in ("class", "vendor", "numa_node", "local_cpus"):
            expected = pathlib.Path(real, name).read_text(encoding="ascii").split()
            self.assertEqual(self.shell(f"cat /sys/class/infiniband/softverbs0/device/{name}", **settings), expected)
        listed = self.shell(f"ls {real}/infiniband /sys/class/infiniband/softverbs0/device/infiniband_verbs", **settings)
        self.assertIn("softverbs0", listed)
        self.assertIn("uverbs0", listed)
        self.shell(f"! test -e /sys/class/infiniband/softverbs0/device/driver; ! test -e {real}/driver", **settings)
        # Beside it lie the files of the machine.
        beside = os.path.relpath("/sys/devices/system", real)
        self.shell(f"test -d /sys/class/infiniband/softverbs0/device/{beside}", **settings)

    def test_malformed_address_is_named(self):
        result = self.run_alone("ibv_devices", SOFTVERBS_PCI="3b:00.0")
        self.assertIn("SOFTVERBS_PCI=3b:00.0 is refused", result.output)


class Launcher(FilesTest):
    def test_preload_of_the_user_is_kept(self):
        other = os.path.join(LIBRARY, "libmlx5.so.1")
        lines = self.shell(f"echo $LD_PRELOAD; cat {PORT}/state; grep -c {other} /proc/self/maps", LD_PRELOAD=other)
        self.assertTrue(lines[0].startswith(other + ":"), lines)
        self.assertEqual(lines[1], "4: ACTIVE")
        self.assertGreater(int(lines[2]), 0)

    def test_bundled_library_is_replaced_with_preload(self):
        program = os.environ["BUNDLED_LIST"]
        self.assertEqual(self.run_alone(program).output, "0 devices\n")
        self.options = ("--preload",)
        self.assertEqual(self.run_alone(program, SOFTVERBS_DEVICES="2").output, "2 devices\nsoftverbs0\nsoftverbs1\n")


class Leftovers(FilesTest):
    """Each test has settings of its own, and so a tree of its own."""

    def start_reader(self, part):
        reader, _ = self.start(["tail", "-f", f"{PORT}/state"], {"SOFTVERBS_VENDOR_PART_ID": str(part)})
        self.await_trees(part, 1)
        return reader

    def test_last_process_removes_the_tree(self):
        part = self.part(0)
        reader = self.start_reader(part)
        read = ["cat", f"{PORT}/state"]
        self.assertEqual(self.run_alone(*read, SOFTVERBS_VENDOR_PART_ID=str(part)).output, "4: ACTIVE\n")
        self.assertEqual(len(trees(part)), 1)
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        self.assertEqual(self.run_alone(*read, SOFTVERBS_VENDOR_PART_ID=str(part)).output, "4: ACTIVE\n")
        self.await_trees(part, 0)

    def test_next_program_removes_the_tree_of_a_killed_one(self):
        part = self.part(1)
        reader = self.start_reader(part)
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        self.run_alone("ibv_devinfo")
        self.await_trees(part, 0)

    def run_with_own_shm(self, options, script):
        """Runs a script where no process of another test removes trees."""
        alone = ["unshare", "--map-root-user", "--mount"]
        if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode != 0:
            self.skipTest("this system does not allow a new mount namespace")
        return self.run_alone(*alone, "sh", "-c", f"mount -t tmpfs -o {options} tmpfs /dev/shm; {script}")

    def test_program_that_ends_without_destructors(self):
        for program in (
            f"sh -c 'read -r line < {PORT}/state; echo $line'",
            f"""python3 -c 'import os; os.write(1, open("{PORT}/state", "rb").read()); os._exit(0)'""",
        ):
            result = self.run_with_own_shm("mode=1777", f"{program}; ls /dev/shm")
            self.assertEqual(result.output, "4: ACTIVE\n")

    def test_end_of_a_child_keeps_the_tree_of_its_parent(self):
        # A shell calls vfork() for commands, and the child of one that does not exist calls _exit().
        script = f"read -r a < {PORT}/state; /nonexistent; cat {PORT}/phys_state; read -r a < {PORT}/state; echo $a"
        result = self.run_alone("sh", "-c", script, SOFTVERBS_VENDOR_PART_ID=str(self.part(3)))
        self.assertEqual(result.output.splitlines()[-2:], ["5: LinkUp", "4: ACTIVE"])

    def test_name_of_another_user(self):
        part = self.part(4)
        reader = self.start_reader(part)
        (tree,) = trees(part)
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        shutil.rmtree(tree, ignore_errors=True)  # a process of another test may have removed it
        os.symlink("/", tree)
        try:
            result = self.run_alone("cat", f"{PORT}/state", SOFTVERBS_VENDOR_PART_ID=str(part))
        finally:
            os.unlink(tree)
        self.assertEqual(result.output, "4: ACTIVE\n")
        self.await_trees(part, 0)

    def test_program_that_changes_its_user(self):
        if os.geteuid() != 0:
            self.skipTest("only root can change its user")
        script = f"""
read = lambda: pathlib.Path("{PORT}/state").read_text()
found = [read()]
os.setresuid(65534, 65534, 65534)
print(json.dumps(found + [read()]))"""
        self.assertEqual(self.python(script), ["4: ACTIVE\n"] * 2)

    def test_permissions_are_not_those_of_the_umask(self):
        part = str(self.part(5))
        shown = self.shell(f"umask 777; stat -c %a {PORT}/state {PORT}/gids/", SOFTVERBS_VENDOR_PART_ID=part)
        self.assertEqual(shown, ["444", "700"])

    def test_tree_that_cannot_be_made_is_reported(self):
        for option, reason in (("ro", "Read-only file system"), ("nr_inodes=20", "No space left on device")):
            result = self.run_with_own_shm(option, f"exec cat {PORT}/state {PORT}/rate")
            lines = [line for line in result.output.splitlines() if line.startswith("softverbs: ")]
            self.assertEqual(len(lines), 1, result)
            self.assertIn(reason, lines[0])
            self.assertIn("Next:", lines[0])

    def part(self, number):
        return 0x8000 | os.getpid() % 0x1000 << 3 | number

    # A process of another test may be removing a tree at this moment.
    def await_trees(self, part, count):
        deadline = time.monotonic() + TIMEOUT_S
        while len(trees(part)) != count and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(len(trees(part)), count)


if __name__ == "__main__":
    main()
