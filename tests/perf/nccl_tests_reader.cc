#include "nccl_tests_reader.h"

#include <cstdio>
#include <sstream>
#include <stdexcept>

namespace verbatim::perf {
namespace {

std::string right(const std::string& text, std::size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}

class Lines {
 public:
  explicit Lines(const std::string& output) : lines_(output) {}

  const std::string& next() {
    if (!std::getline(lines_, line_)) throw std::runtime_error("the output ends after line " + std::to_string(number_));
    ++number_;
    return line_;
  }
  bool has_next() { return lines_.peek() != std::istringstream::traits_type::eof(); }
  // Whether the next line begins so.
  bool is_next(char first) { return lines_.peek() == static_cast<unsigned char>(first); }
  void expect(const std::string& line) {
    if (next() != line) fail("instead of \"" + line + "\"");
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error("line " + std::to_string(number_) + ": \"" + line_ + "\" " + why);
  }

 private:
  std::istringstream lines_;
  std::string line_;
  int number_ = 0;
};

// The columns of a line, one after the other.
class Fields {
 public:
  Fields(const Lines& lines, std::string line) : lines_(lines), line_(std::move(line)) {}

  // The text of a column of `width` characters at its right edge, behind `gap` spaces.
  std::string text(std::size_t gap, std::size_t width) {
    if (line_.size() < at_ + gap + width) lines_.fail("is too short");
    const std::string field = line_.substr(at_, gap + width);
    at_ += gap + width;
    const std::size_t first = field.find_first_not_of(' ');
    if (first == std::string::npos) return {};
    if (first < gap) lines_.fail("has no gap before column " + std::to_string(at_ - width));
    if (field.back() == ' ') lines_.fail("has a column that is not at its right edge");
    return field.substr(first);
  }
  // Whether the line goes on with these characters, which are read then.
  bool skip(const std::string& text) {
    if (line_.compare(at_, text.size(), text) != 0) return false;
    at_ += text.size();
    return true;
  }
  double number(std::size_t gap, std::size_t width) {
    const std::string field = text(gap, width);
    std::size_t used = 0;
    double value = 0;
    try {
      value = std::stod(field, &used);
    } catch (const std::exception&) {
      used = std::string::npos;
    }
    if (used != field.size()) lines_.fail("has \"" + field + "\" where a number must be");
    return value;
  }
  void end() const {
    if (at_ != line_.size()) lines_.fail("is too long");
  }

 private:
  const Lines& lines_;
  const std::string line_;
  std::size_t at_ = 0;
};

// writeDeviceReport, lines 623 to 641: the version (NCCL_TESTS_VERSION is 2.19.6), the program, the options.
void read_head(Lines& lines, NcclTestsOutput& output, const NcclTestsColumns& columns) {
  int end = -1;
  int headers = 0;
  int library = 0;
  const std::string version = lines.next();
  std::sscanf(version.c_str(), "# nccl-tests version 2.19.6 nccl-headers=%d nccl-library=%d%n", &headers, &library,
              &end);
  if (end != static_cast<int>(version.size())) lines.fail("is not the line of the version");
  const std::string starting = "# Collective test starting: ";
  const std::string program = lines.next();
  if (!program.starts_with(starting)) lines.fail("is not the line of the program");
  output.program = program.substr(starting.size());
  const std::string options = lines.next();
  char kind[16] = {};
  int aggregated = 0;
  int graph = 0;
  end = -1;
  std::sscanf(
      options.c_str(),
      "# nThread %d nGpus %d minBytes %zu maxBytes %zu step: %zu(%15[a-z]) warmup iters: %d iters: %d agg iters: "
      "%d validation: %d graph: %d unalign: %d%n",
      &output.threads, &output.gpus, &output.min_bytes, &output.max_bytes, &output.step, kind,
      &output.warmup_iterations, &output.iterations, &aggregated, &output.validation, &graph, &output.unalign, &end);
  if (end != static_cast<int>(options.size())) lines.fail("is not the line of the options");
  output.step_kind = kind;
  // Here the clock is another one.
  if (columns.per_iteration && !lines.next().starts_with("# Per-Iteration Report: ")) lines.fail("tells no -I");
  lines.expect("#");
}

// writeDeviceReport, lines 667 and 687: one for each rank; line 744 ends them.
void read_devices(Lines& lines, NcclTestsOutput& output) {
  lines.expect("# Using devices");
  for (std::string line = lines.next(); line != "#"; line = lines.next()) {
    NcclTestsDevice device;
    char host[256] = {};
    char pci[16] = {};
    int group = -1;
    int end = -1;
    std::sscanf(line.c_str(), "#  Rank %2d Group %2d Pid %6d on %255s device %2d [%15[0-9a-f:]] %n", &device.rank,
                &group, &device.pid, host, &device.device, pci, &end);
    if (end < 0 || std::string(pci).size() != 10) lines.fail("is not the line of a rank");
    device.host = host;
    device.pci = pci;
    device.name = line.substr(static_cast<std::size_t>(end));
    output.devices.push_back(device);
  }
}

// writeResultHeader, lines 746 to 760: a line above both runs, the titles, the units.
void read_titles(Lines& lines, const NcclTestsColumns& columns) {
  const auto begin = [](const std::array<const char*, 5>& titles) {
    return "# " + right(titles[0], 10) + "  " + right(titles[1], 12) + "  " + right(titles[2], 8) + "  " +
           right(titles[3], 6) + "  " + right(titles[4], 6);
  };
  const auto run = [&](const std::array<const char*, 8>& titles) {
    std::string text = "  " + right(titles[0], 7);
    for (std::size_t i = 1; i < 4; ++i) text += "  " + right(titles[i], 6);
    for (std::size_t i = 4; i < 8 && columns.per_iteration; ++i) text += "  " + right(titles[i], 7);
    return text;
  };
  const auto end = [&](const char* title) { return columns.timestamps ? " " + right(title, 19) : std::string(" "); };
  const std::array<const char*, 8> names{"time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"};
  const std::array<const char*, 8> units{"(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)", "(%)"};
  std::string above = begin({"", "", "", "", ""});
  if (columns.per_iteration) {
    above +=
        std::string(14, ' ') + "out-of-place (+ per-iteration)" + std::string(32, ' ') + "in-place (+ per-iteration)";
  } else {
    above += std::string(11, ' ') + "out-of-place" + std::string(23, ' ') + "in-place" + std::string(10, ' ');
  }
  lines.expect(above);
  lines.expect(begin({"size", "count", "type", "redop", "root"}) + run(names) + run(names) + end("timestamp"));
  lines.expect(begin({"(B)", "(elements)", "", "", ""}) + run(units) + run(units) + end("%Y-%m-%d %H:%M:%S"));
}

// writeBenchmarkLineBody, lines 508 and 510, whose numbers getFloatStr fits into the columns; writePerIterReport, line
// 568.
NcclTestsRun read_run(Fields& fields, const NcclTestsColumns& columns) {
  NcclTestsRun run{fields.number(2, 7), fields.number(2, 6), fields.number(2, 6), {}, {}};
  if (!fields.skip("    N/A")) run.wrong = fields.number(2, 6);
  for (double& value : run.iterations) {
    if (columns.per_iteration) value = fields.number(2, 7);
  }
  return run;
}

// writeBenchmarkLinePreamble, line 457; two runs; writeTimestamp, line 609.
NcclTestsRow read_row(Lines& lines, const NcclTestsColumns& columns) {
  Fields fields(lines, lines.next());
  NcclTestsRow row;
  row.size = static_cast<std::size_t>(fields.number(0, 12));
  row.count = static_cast<std::size_t>(fields.number(2, 12));
  row.type = fields.text(2, 8);
  row.redop = fields.text(2, 6);
  row.root = static_cast<int>(fields.number(2, 6));
  row.out_of_place = read_run(fields, columns);
  row.in_place = read_run(fields, columns);
  if (columns.timestamps) row.timestamp = fields.text(2, 19);
  fields.end();
  return row;
}

// writeResultFooter, lines 777 to 780; finalizeFooter, line 856; writeErrors, line 843.
void read_foot(Lines& lines, NcclTestsOutput& output) {
  const auto value_of = [&lines](const std::string& name) {
    const std::string begin = "# " + name + std::string(20 - name.size(), ' ') + " : ";
    const std::string line = lines.next();
    if (!line.starts_with(begin)) lines.fail("is not the line of \"" + name + "\"");
    return line.substr(begin.size());
  };
  char word[16] = {};
  int end = -1;
  const std::string bounds = value_of("Out of bounds values");
  std::sscanf(bounds.c_str(), "%lld %15[A-Z]%n", &output.out_of_bounds, word, &end);
  if (end != static_cast<int>(bounds.size())) lines.fail("has no number and word");
  if (std::string(word) != (output.out_of_bounds == 0 ? "OK" : "FAILED")) lines.fail("has the wrong word");
  std::istringstream busbw(value_of("Avg bus bandwidth"));
  busbw >> output.busbw;
  if (busbw.get() != ' ') lines.fail("has no space behind the number");
  std::getline(busbw, output.busbw_result);
  if (!output.busbw_result.empty() && output.busbw_result != "OK" && output.busbw_result != "FAILED")
    lines.fail("has another word");
  lines.expect("#");
  lines.expect("# Collective test concluded: " + output.program);
  lines.expect("#");
  lines.expect("");
  if (lines.has_next()) {
    lines.next();
    lines.fail("comes after the end");
  }
}

}  // namespace

NcclTestsOutput read_nccl_tests(const std::string& text, const NcclTestsColumns& columns) {
  NcclTestsOutput output;
  Lines lines(text);
  read_head(lines, output, columns);
  read_devices(lines, output);
  read_titles(lines, columns);
  while (!lines.is_next('#')) output.rows.push_back(read_row(lines, columns));
  read_foot(lines, output);
  return output;
}

}  // namespace verbatim::perf
