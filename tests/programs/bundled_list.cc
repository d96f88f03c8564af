// Lists the devices of the libibverbs that it is linked with: bundled_verbs.cc, as a wheel brings one of its own.
#include <infiniband/verbs.h>

#include <cstdio>

int main() {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  std::printf("%d devices\n", count);
  for (int i = 0; i < count; ++i) std::puts(ibv_get_device_name(list[i]));
  return 0;
}
