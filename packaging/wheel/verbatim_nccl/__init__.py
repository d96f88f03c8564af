"""Where pip has installed Verbatim's files, the variables with which NCCL loads the plugin, and the tools as commands."""

import os
import pathlib
import sys

FILES = pathlib.Path(__file__).resolve().parent / "files"
PLUGIN = FILES / "lib/libnccl-net-verbatim.so"


def environment():
    """The variables that every rank needs. NCCL opens a plugin by its path, so no library path has to be changed."""
    return {"NCCL_NET_PLUGIN": str(PLUGIN), "NCCL_NET": "Verbatim", "NCCL_NET_PLUGIN_REF_COUNT": "1"}


def _run(name):
    program = str(FILES / "bin" / name)
    os.execv(program, [program, *sys.argv[1:]])


def run_softverbs():
    _run("softverbs")


def run_verbatim_eplb():
    _run("verbatim-eplb")


def run_verbatim_exporter():
    _run("verbatim-exporter")


def run_verbatim_info():
    _run("verbatim-info")


def run_verbatim_kv():
    _run("verbatim-kv")


def run_verbatim_model():
    _run("verbatim-model")


def run_verbatim_perf():
    _run("verbatim-perf")


def run_verbatim_report():
    """With the packages of this environment."""
    os.execv(sys.executable, [sys.executable, str(FILES / "bin/verbatim-report"), *sys.argv[1:]])


def run_verbatim_top():
    _run("verbatim-top")
