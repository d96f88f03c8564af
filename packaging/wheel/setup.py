"""The parts of the wheel that pyproject.toml cannot say: it has programs of one machine and no module in C."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution


class Binary(Distribution):
    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    """Of any Python, and of systems with this glibc or a later one (PEP 600)."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2].replace("linux_", "manylinux_@GLIBC@_", 1))


setup(distclass=Binary, cmdclass={"bdist_wheel": AnyPython})
