// Opening the files of the tree.
#pragma once

#include "softverbs/files/served_path.h"

namespace verbatim::softverbs {

// Opens a file of the tree as the kernel would open one of sysfs or a device node.
int open_served(const Path& path, int flags);

// /proc/modules. The modules that NICs use for GPU memory are hidden here too, as they are in /sys/module.
bool is_modules(const char* path);
int open_modules(int flags);

// Sets errno; returns -1.
int fail(int error);

}  // namespace verbatim::softverbs
