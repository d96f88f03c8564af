"""python -m verbatim_nccl env | path"""

import shlex
import sys

from verbatim_nccl import FILES, environment

USAGE = """usage: python -m verbatim_nccl env    prints export lines for a shell: eval "$(python -m verbatim_nccl env)"
       python -m verbatim_nccl path   prints the directory of Verbatim's files"""


def main(arguments):
    if arguments == ["env"]:
        for name, value in environment().items():
            print(f"export {name}={shlex.quote(value)}")
    elif arguments == ["path"]:
        print(FILES)
    elif arguments in (["-h"], ["--help"]):
        print(USAGE)
    else:
        print(USAGE, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
