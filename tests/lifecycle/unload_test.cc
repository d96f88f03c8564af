// dlclose must unmap the library even if comms are open. exit with outstanding requests must not destroy any object.
#include <dlfcn.h>

#include <fstream>
#include <string>

#include "conformance.h"
#include "process.h"
#include "process_resources.h"

namespace conformance {
namespace {

bool is_mapped(const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  const std::string name = path.substr(path.rfind('/') + 1);
  for (std::string line; std::getline(maps, line);) {
    if (line.find(name) != std::string::npos) return true;
  }
  return false;
}

// The fixture's service thread has called the library and still runs when the library is unloaded.
class Unload : public Conformance {
 protected:
  void unload() {
    ASSERT_TRUE(is_mapped(options().plugin));
    TearDown();
    void* const pinned = dlopen(options().plugin.c_str(), RTLD_NOLOAD | RTLD_NOW);
    EXPECT_EQ(pinned, nullptr);
    if (pinned != nullptr) dlclose(pinned);
    EXPECT_FALSE(is_mapped(options().plugin));
    EXPECT_EQ(verbs_alive(), "");
  }
};
EVERY_VERSION(Unload);

TEST_P(Unload, AfterTraffic_LibraryIsUnmapped) {
  for (int round = 0; round < 10 && !HasFailure(); ++round) {
    {
      TestConnection link = this->link();
      exchange_one(link, 300'000);
    }
    unload();
    SetUp();
  }
}

// Without finalize, also in the versions that have it.
TEST_P(Unload, EverythingOpen_LibraryIsUnmapped) {
  std::vector<unsigned char> memory(4096);
  for (int round = 0; round < 10 && !HasFailure(); ++round) {
    void* context = nullptr;
    EXPECT_OK(net().init(1, {}, &context));
    const End end{context, 0};
    Handle handle;
    ASSERT_NE(listen(end, handle), nullptr);
    void* half = nullptr;
    EXPECT_OK(net().connect(context, 0, handle.bytes, &half));
    TestConnection link = this->link(end, end);
    exchange_one(link, 1000);
    void* mhandle = nullptr;
    EXPECT_OK(net().reg_mr(link.recv_comm, memory.data(), memory.size(), nccl::kPtrHost, &mhandle));
    Traffic traffic(net());
    traffic.recv(link.recv_comm, {{memory.data(), memory.size(), 0, mhandle}});
    ASSERT_TRUE(traffic.step());
    link.send_comm = nullptr;
    link.recv_comm = nullptr;
    unload();
    SetUp();
  }
}

TEST_P(Unload, WithoutInit_LeavesNothing) {
  ProcessResources before;
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    if (round == 10) before = ProcessResources::take();
    unload();
    SetUp();
  }
  EXPECT_TRUE(is_restored(before, 4096));
}

// The process writes the objects that it modifies or destroys during exit to its output.
TEST_P(Unload, ExitWithOutstandingRequests_DestroysNothing) {
  Process process("exit-busy", version());
  const Exit end = process.wait();
  EXPECT_EQ(end.status, 0);
  EXPECT_EQ(end.output, "");
}

// A static object or an exit handler of the application can unload NCCL and with it the plugin.
TEST_P(Unload, UnloadInExitHandler_ExitsCleanly) {
  Process process("exit-unload", version());
  EXPECT_EQ(process.wait().status, 0);
}

TEST_P(Unload, ExitAfterClose_DestroysOnlyProcessObjects) {
  Process process("exit-idle", version());
  const Exit end = process.wait();
  EXPECT_EQ(end.status, 0);
  // Up to v10 the library closes the context of the process. From v11 on the caller must finalize its contexts.
  EXPECT_EQ(end.output, version() >= 11 ? "" : "pd\ncontext\n");
}

}  // namespace
}  // namespace conformance
