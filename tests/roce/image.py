"""The virtual machine's kernel and initramfs, built once and cached.

The kernel is the distribution's stock kernel; it is unpacked and not installed. The initramfs holds busybox, the modules and
guest_init, which mounts the host's file system. All other programs come from that file system.
"""

import lzma
import os
import re
import shutil
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
META_PACKAGES = ("linux-image-amd64", "linux-image-generic")  # Debian's, Ubuntu's
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "rdma": "iproute2",
    "tc": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
}
MODULES = (
    "virtio_pci",
    "virtio_net",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",  # rxe finds the checksum by name, so that depmod does not see the dependency
    "crc32c_generic",
    "dummy",
    "veth",
    "sch_netem",
    "tcp_diag",
    "ib_uverbs",
    "rdma_rxe",
)


class Missing(Exception):
    """This machine lacks a program or package that virtual machines need. The text is for the user."""


def search_path():
    """PATH plus the directories of depmod and tc, which an ordinary user's PATH lacks."""
    return os.pathsep.join([os.environ.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin", "/usr/local/sbin"])


def program(name):
    path = shutil.which(name, path=search_path())
    if path is None:
        raise Missing(f"{name} is not installed (Debian package {PROGRAMS.get(name, name)}; tools/setup --full installs it)")
    return path


def require_programs():
    for name in PROGRAMS:
        program(name)
    if not os.path.isdir("/etc/libibverbs.d"):
        raise Missing("rdma-core's providers are not installed (Debian package ibverbs-providers; tools/setup --full installs them)")


def run(*arguments, **options):
    """Returns the standard output. Raises Missing when the program fails."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        raise Missing(f"{' '.join(arguments)}: exit status {done.returncode}\n{done.stderr.strip()}")
    return done.stdout


def kernel_packages():
    """The packages with the kernel and its modules that apt has for this distribution, newest first."""
    program("apt-get")
    for meta in META_PACKAGES:
        found, pending = [], [meta]
        while pending:
            shown = run("apt-cache", "depends", "--no-recommends", "--no-suggests", pending.pop(0))
            for name in re.findall(r"^ +\|?Depends: (linux-(?:image|modules)-\S+)$", shown, re.M):
                if name not in found:
                    found.append(name)
                    pending.append(name)
        if found:
            return found
    raise Missing(f"apt has none of the kernel packages {', '.join(META_PACKAGES)} (apt-get update fetches its lists)")


def unpack_kernel(directory):
    """Downloads the kernel and unpacks it below the directory. Returns its version."""
    packages = kernel_packages()
    # When root runs apt, apt downloads as its own user, which may not write to this directory.
    try:
        run("apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", *packages, cwd=directory)
    except Missing as missing:
        reason = str(missing).splitlines()[-1]
        raise Missing(f"apt-get cannot download the kernel, {' '.join(packages)}: {reason}") from None
    for name in sorted(os.listdir(directory)):
        if name.endswith(".deb"):
            run("dpkg-deb", "-x", name, "tree", cwd=directory)
            os.unlink(os.path.join(directory, name))
    versions = [name[8:] for name in os.listdir(os.path.join(directory, "tree/boot")) if name.startswith("vmlinuz-")]
    if len(versions) != 1:
        raise Missing(f"{' '.join(packages)} contain the kernels {versions}, exactly one was expected")
    return versions[0]


def module_files(tree, version):
    """The modules' files in load order."""
    run(program("depmod"), "-b", tree, version)
    order = []
    for module in MODULES:
        shown = run(program("modprobe"), "-d", tree, "-S", version, "--show-depends", module)
        for path in re.findall(r"^insmod (\S+)", shown, re.M):
            if path not in order:
                order.append(path)
    return order


def module_bytes(path):
    with open(path, "rb") as file:
        packed = file.read()
    if path.endswith(".xz"):
        return lzma.decompress(packed)
    if path.endswith(".zst"):
        return subprocess.run([program("zstd"), "-dc"], input=packed, stdout=subprocess.PIPE, check=True).stdout
    return packed


def write_initramfs(directory, modules, target):
    root = os.path.join(directory, "initramfs")
    for name in ("bin", "modules", "proc", "sys", "dev", "host", "upper", "top"):
        os.makedirs(os.path.join(root, name))
    shutil.copy(program("busybox"), os.path.join(root, "bin/busybox"))
    shutil.copy(os.path.join(HERE, "guest_init"), os.path.join(root, "init"))
    os.chmod(os.path.join(root, "init"), 0o755)
    with open(os.path.join(root, "modules/order"), "w", encoding="ascii") as order:
        for path in modules:
            name = os.path.basename(path).partition(".ko")[0] + ".ko"
            order.write(name + "\n")
            with open(os.path.join(root, "modules", name), "wb") as file:
                file.write(module_bytes(path))
    names = []
    for base, directories, files in os.walk(root):
        names += [os.path.relpath(os.path.join(base, name), root) for name in directories + files]
    archive = subprocess.run(
        [program("cpio"), "--create", "--format=newc", "--quiet", "--owner=0:0"],
        input="".join(name + "\n" for name in names).encode(),
        stdout=subprocess.PIPE,
        cwd=root,
        check=True,
    ).stdout
    with open(target, "wb") as file:
        file.write(archive)


def is_newer(path, than):
    return os.path.exists(path) and os.path.getmtime(path) >= max(os.path.getmtime(other) for other in than)


def prepare(cache):
    """Returns the paths of the kernel and the initramfs in the directory `cache`; builds them when they are missing or old."""
    require_programs()
    kernel, initramfs = os.path.join(cache, "vmlinuz"), os.path.join(cache, "initramfs")
    sources = [os.path.join(HERE, "guest_init"), os.path.abspath(__file__)]
    if os.path.exists(kernel) and is_newer(initramfs, sources):
        return kernel, initramfs
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as directory:
        version = unpack_kernel(directory)
        tree = os.path.join(directory, "tree")
        if os.path.isdir(os.path.join(tree, "usr/lib/modules")) and not os.path.exists(os.path.join(tree, "lib")):
            os.symlink("usr/lib", os.path.join(tree, "lib"))
        made = os.path.join(directory, "made")
        write_initramfs(directory, module_files(tree, version), made)
        os.replace(os.path.join(tree, "boot", "vmlinuz-" + version), kernel)
        os.replace(made, initramfs)
        os.utime(kernel)
    return kernel, initramfs
