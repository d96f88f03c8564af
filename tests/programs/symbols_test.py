#!/usr/bin/env python3
#: test programs-symbols-symbols has=nm args=Symbols
"""Every symbol of libibverbs and libmlx5 that rdma-core's libraries and programs import is in softverbs' libraries, with
the same version."""

import glob
import os
import re
import shutil
import subprocess

from program_test_case import LIBRARY, ProgramTest, main

# The programs, the libraries that they link, and the drivers in the same packages.
PROGRAMS = [f"ib_{kind}_{what}" for kind in ("write", "read", "send", "atomic") for what in ("bw", "lat")]
PROGRAMS += ["ibv_rc_pingpong", "ibv_srq_pingpong", "ibv_devices", "ibv_devinfo"]
LIBRARIES = ["libefa.so.1", "librdmacm.so.1", "libmlx5.so.1", "libmlx4.so.1"]

# The symbols of libibverbs 44 with version IBVERBS_1.0 are the interface before 2006, which has other structures.
# mlx5dv_init_obj@MLX5_1.0 was replaced in 2017.
OLDEST = ("IBVERBS_1.0", "MLX5_1.0")

# Symbols that releases after 44 added.
NEWER = {
    "IBVERBS_1.15": ["ibv_alloc_dmah", "ibv_dealloc_dmah", "ibv_reg_mr_ex"],
    "IBVERBS_1.16": ["ibv_dm_export_dmabuf_fd", "ibv_query_port_speed"],
    "IBVERBS_1.17": ["ibv_alloc_buf", "ibv_free_buf", "ibv_reg_buf_mr"],
    "IBVERBS_1.18": [
        "_ibv_query_comp_cntr_caps",
        "ibv_create_comp_cntr",
        "ibv_destroy_comp_cntr",
        "ibv_export_buf_dmabuf_fd",
        "ibv_inc_comp_cntr",
        "ibv_inc_err_comp_cntr",
        "ibv_qp_attach_comp_cntr",
        "ibv_read_comp_cntr",
        "ibv_read_err_comp_cntr",
        "ibv_set_comp_cntr",
        "ibv_set_err_comp_cntr",
    ],
}


def symbols(path, kind):
    """A set of (name, version). nm prints @@ before a default version, @ before any other."""
    shown = subprocess.run(["nm", "-D", kind, path], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^\s*(?:[0-9a-f]+ )?\s*\w (\w+)@@?(\S+)$", shown, re.M))

# Whether a missing program or library fails the test instead of skipping it (option `programs`).
ALL_REQUIRED = os.environ.get("PROGRAMS_REQUIRED") == "1"


def installed(library):
    found = glob.glob(f"/usr/lib/*/{library}") + glob.glob(f"/usr/lib64/{library}")
    return found[0] if found else None


class Symbols(ProgramTest):
    def setUp(self):
        super().setUp()
        self.verbs = symbols(os.path.join(LIBRARY, "libibverbs.so.1"), "--defined-only")
        self.mlx5 = symbols(os.path.join(LIBRARY, "libmlx5.so.1"), "--defined-only")

    def require_installed(self, path, name):
        if path is None:
            (self.fail if ALL_REQUIRED else self.skipTest)(f"{name} is not installed")
        return path

    def expect_all_present(self, wanted, ours):
        self.assertTrue(wanted)
        self.assertEqual(sorted(wanted - ours), [])

    def test_library_symbols_present(self):
        for library in LIBRARIES:
            with self.subTest(library=library):
                path = self.require_installed(installed(library), library)
                wanted = {s for s in symbols(path, "--undefined-only") if s[1].startswith("IBVERBS")}
                self.expect_all_present(wanted, self.verbs)

    def test_program_symbols_present(self):
        for program in PROGRAMS:
            with self.subTest(program=program):
                path = self.require_installed(shutil.which(program), program)
                wanted = symbols(path, "--undefined-only")
                self.expect_all_present({s for s in wanted if s[1].startswith("IBVERBS")}, self.verbs)
                mlx5 = {s for s in wanted if s[1].startswith("MLX5")}
                self.assertEqual(sorted(mlx5 - self.mlx5), [])

    def test_all_symbols_of_installed_libraries_present(self):
        for library, present_here in (("libibverbs.so.1", self.verbs), ("libmlx5.so.1", self.mlx5)):
            path = self.require_installed(installed(library), library)
            names = {name for name, _ in present_here}
            wanted = symbols(path, "--defined-only")
            self.assertEqual(sorted(name for name, version in wanted if version in OLDEST and name not in names), [])
            self.expect_all_present({s for s in wanted if s[1] not in OLDEST}, present_here)

    def test_symbols_of_newer_releases_present(self):
        for version, names in NEWER.items():
            self.expect_all_present({(name, version) for name in names}, self.verbs)


if __name__ == "__main__":
    main()
