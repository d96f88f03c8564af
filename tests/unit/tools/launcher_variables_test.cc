//: in verbatim_perf_test

// The variables of launchers: which rank of which job a process is, and where the ranks meet.
#include "ranks/launcher_variables.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "ranks/failure.h"
#include "ranks/meeting_point.h"

namespace verbatim::ranks {
namespace {

using Environment = std::map<std::string, std::string>;

std::optional<LaunchedRank> launched_by(const Environment& environment) {
  return launched_rank([&environment](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

// "rank/ranks at PLACE", without the name of a local socket.
std::string described(const Environment& environment) {
  const auto launched = launched_by(environment);
  if (!launched) return "none";
  std::string where;
  try {
    where = meeting_point(*launched);
    check_meeting_point(where);
  } catch (const Failure& failure) {
    where = failure.what();
  }
  if (where.starts_with("unix:")) where = "this host";
  return std::to_string(launched->rank) + "/" + std::to_string(launched->ranks) + " of " + launched->launcher + " at " +
         where;
}

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more) environment[name] = value;
  return environment;
}

const Environment kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Environment kSlurm{{"SLURM_PROCID", "2"},         {"SLURM_NTASKS", "8"},
                         {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_STEP_NODELIST", "node[07-08,11]"},
                         {"SLURM_JOB_ID", "77"},        {"SLURM_STEP_ID", "0"}};
const Environment kTorchrun{{"RANK", "3"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "10.0.0.1"},
                            {"MASTER_PORT", "29500"},
                            {"TORCHELASTIC_RUN_ID", "none"}};

TEST(LaunchedRank, NoLauncher_IsNone) {
  EXPECT_EQ("none", described({}));
  EXPECT_EQ("none", described({{"RANK", "1"}, {"WORLD_SIZE", "2"}}));
  EXPECT_EQ("none", described({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}));
}

TEST(LaunchedRank, OpenMpi_MeetsOnOneHost) {
  EXPECT_EQ("1/4 of Open MPI at this host", described(kOpenMpi));
  EXPECT_EQ("1/4 of Open MPI at this host", described({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}}));
}

TEST(LaunchedRank, OpenMpiOnSeveralHosts_NamesMissingOption) {
  for (const Environment& hosts :
       {Environment{{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
        Environment{{"OMPI_COMM_WORLD_LOCAL_SIZE", ""}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}}) {
    EXPECT_NE(std::string::npos, described(with(kOpenMpi, hosts)).find("Next: give all of them --root HOST:PORT"));
  }
  EXPECT_EQ(
      "1/4 of Open MPI at a:5",
      described(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "5"}})));
}

TEST(LaunchedRank, Pmi_MeetsOnOneHost) {
  const Environment pmi{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}};
  EXPECT_EQ("0/2 of PMI at this host", described(pmi));
  EXPECT_EQ("0/2 of PMI at this host", described(with(pmi, {{"MPI_LOCALNRANKS", "2"}})));
  EXPECT_NE(std::string::npos, described(with(pmi, {{"MPI_LOCALNRANKS", "1"}})).find("--root"));
}

TEST(LaunchedRank, SlurmStep_MeetsOnFirstHost) {
  const auto launched = launched_by(kSlurm);
  ASSERT_TRUE(launched.has_value());
  EXPECT_EQ("node07", launched->host);
  const std::string where = meeting_point(*launched);
  EXPECT_EQ(0U, where.find("node07:")) << where;
  EXPECT_GE(std::stoi(where.substr(7)), 20'000);
  EXPECT_LT(std::stoi(where.substr(7)), 32'000);
  for (const auto& [list, first] :
       std::map<std::string, std::string>{{"a,b", "a"}, {"r[1-2]n[30,31],x", "r1n30"}, {"n[3]-ib,x", "n3-ib"}}) {
    EXPECT_EQ(first, launched_by(with(kSlurm, {{"SLURM_STEP_NODELIST", list}}))->host);
  }
}

TEST(LaunchedRank, SlurmStepOnOneHost_NeedsNoPort) {
  EXPECT_EQ("2/8 of Slurm at this host", described(with(kSlurm, {{"SLURM_STEP_NODELIST", "node07"}})));
  EXPECT_EQ("2/8 of Slurm at this host", described(with(kSlurm, {{"SLURM_STEP_NUM_NODES", "1"}})));
}

TEST(LaunchedRank, SlurmBatchScript_IsNoStep) {
  EXPECT_EQ("none", described({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_NODELIST", "node[1-2]"}}));
  // The shell of an allocation is a step of one task.
  EXPECT_EQ("none", described(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})));
}

TEST(LaunchedRank, TwoSteps_MeetAtDifferentPorts) {
  const auto port_of = [](const char* step) {
    return meeting_point(*launched_by(with(kSlurm, {{"SLURM_STEP_ID", step}})));
  };
  EXPECT_EQ(port_of("0"), port_of("0"));
  EXPECT_NE(port_of("0"), port_of("1"));
  EXPECT_NE(start_of(*launched_by(kSlurm)), start_of(*launched_by(with(kSlurm, {{"SLURM_STEP_ID", "1"}}))));
}

TEST(LaunchedRank, Torchrun_MeetsAtMaster) {
  EXPECT_EQ("3/8 of torchrun at 10.0.0.1:29500", described(kTorchrun));
  EXPECT_EQ("3/8 of torchrun at this host", described(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "8"}})));
  EXPECT_EQ("3/8 of torchrun at [fd00::1]:29500", described(with(kTorchrun, {{"MASTER_ADDR", "fd00::1"}})));
  // The agent has taken MASTER_PORT.
  const std::string other = described(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  EXPECT_EQ(0U, other.find("3/8 of torchrun at 10.0.0.1:")) << other;
  EXPECT_EQ(std::string::npos, other.find("29500")) << other;
}

TEST(LaunchedRank, VariablesOfTorchDistributed_AreEnough) {
  EXPECT_EQ("1/2 of torch.distributed at pod-0:23456",
            described({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "pod-0"}, {"MASTER_PORT", "23456"}}));
}

TEST(LaunchedRank, NestedLaunchers_InnermostCounts) {
  EXPECT_EQ("3/8 of torchrun at 10.0.0.1:29500", described(with(with(kTorchrun, kOpenMpi), kSlurm)));
  EXPECT_EQ("1/4 of Open MPI at this host", described(with(kOpenMpi, kSlurm)));
  EXPECT_EQ("0/2 of PMI at this host", described(with(kSlurm, {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}})));
  EXPECT_NE(std::string::npos, described(with(kSlurm, {{"PMI_RANK", "2"}, {"PMI_SIZE", "8"}})).find("2/8 of Slurm"));
}

TEST(LaunchedRank, InvalidVariables_AreNamed) {
  const auto why = [](const Environment& environment) -> std::string {
    try {
      launched_by(environment);
    } catch (const Failure& failure) {
      return failure.what();
    }
    return "";
  };
  EXPECT_EQ("OMPI_COMM_WORLD_RANK is not a number: 'x'", why(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "x"}})));
  EXPECT_EQ("OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4",
            why(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "4"}})));
  EXPECT_EQ("MASTER_PORT is not a port: 70000", why(with(kTorchrun, {{"MASTER_PORT", "70000"}})));
}

TEST(MeetingPoint, MalformedPlace_IsRejected) {
  for (const char* where : {"", "host", "host:", ":5", "host:0", "host:70000", "host:x", "unix:"}) {
    EXPECT_THROW(check_meeting_point(where), Failure) << where;
  }
  for (const char* where : {"host:1", "10.0.0.1:65535", "[::1]:5", "unix:name"}) {
    EXPECT_NO_THROW(check_meeting_point(where)) << where;
  }
}

}  // namespace
}  // namespace verbatim::ranks
