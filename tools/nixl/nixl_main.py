"""nixl_main.py RESULT [PROGRAM PLAN]: runs the program's ranks, or reports only the version of NIXL."""

import nixl_ranks

nixl_ranks.main()
