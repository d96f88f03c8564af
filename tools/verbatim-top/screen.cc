#include "verbatim-top/screen.h"

#include <curses.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "base/clock.h"

namespace verbatim::top {
namespace {

constexpr short kAlarmColors = 1;
constexpr const char* kKeys =
    "q quit  b bytes  m messages  o outstanding  w waiting  p PID  c connections  arrows, page keys: scroll";

class Screen {
 public:
  Screen() {
    if (::isatty(STDIN_FILENO) == 0 || ::isatty(STDOUT_FILENO) == 0) {
      throw std::runtime_error("there is no terminal. Next: --once, or --once --json");
    }
    if (std::getenv("TERM") == nullptr) throw std::runtime_error("TERM is not set. Next: set it, or use --once");
    terminal_ = newterm(nullptr, stdout, stdin);
    if (terminal_ == nullptr) {
      throw std::runtime_error("the terminal's type (TERM) is not known here. Next: TERM=xterm, or --once");
    }
    cbreak();
    noecho();
    curs_set(0);
    keypad(stdscr, TRUE);
    if (has_colors()) {
      start_color();
      use_default_colors();
      init_pair(kAlarmColors, COLOR_RED, -1);
    }
  }
  ~Screen() {
    endwin();
    delscreen(terminal_);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void draw(const std::vector<Line>& lines, std::size_t& first) const {
    const auto height = static_cast<std::size_t>(std::max(LINES - 1, 1));
    first = std::min(first, lines.size() > height ? lines.size() - height : 0);
    erase();
    for (std::size_t row = 0; row < height && first + row < lines.size(); ++row) {
      const Line& line = lines[first + row];
      const chtype style = line.style == Line::Style::kAlarm  ? COLOR_PAIR(kAlarmColors) | A_BOLD
                           : line.style == Line::Style::kHead ? A_REVERSE
                                                              : A_NORMAL;
      attrset(static_cast<int>(style));
      mvaddnstr(static_cast<int>(row), 0, line.text.c_str(), COLS);
    }
    attrset(A_NORMAL);
    mvaddnstr(LINES - 1, 0, kKeys, COLS - 1);
    refresh();
  }

 private:
  SCREEN* terminal_ = nullptr;
};

struct Choice {
  Sort sort;
  bool connections = true;
  bool quit = false;
  std::size_t first = 0;
};

void process_key(int key, Choice& choice) {
  const auto page = static_cast<std::size_t>(std::max(LINES - 2, 1));
  const auto back = [&](std::size_t lines) { choice.first -= std::min(choice.first, lines); };
  switch (key) {
    case 'q':
      choice.quit = true;
      break;
    case 'b':
      choice.sort = Sort::kBytes;
      break;
    case 'm':
      choice.sort = Sort::kMessages;
      break;
    case 'o':
      choice.sort = Sort::kOutstanding;
      break;
    case 'w':
      choice.sort = Sort::kWaiting;
      break;
    case 'p':
      choice.sort = Sort::kPid;
      break;
    case 'c':
      choice.connections = !choice.connections;
      break;
    case KEY_UP:
      back(1);
      break;
    case KEY_DOWN:
      ++choice.first;
      break;
    case KEY_PPAGE:
      back(page);
      break;
    case KEY_NPAGE:
      choice.first += page;
      break;
    default:
      break;
  }
}

}  // namespace

void run_screen(live::Sampler& sampler, int interval_ms, Sort sort) {
  const Screen screen;
  Choice choice{.sort = sort};
  const std::uint64_t interval_ns = static_cast<std::uint64_t>(interval_ms) * kNanosecondsPerMillisecond;
  live::View view = sampler.sample();
  std::uint64_t next = monotonic_ns() + std::min(interval_ns, kNanosecondsPerSecond / 4);  // the first rates
  while (!choice.quit) {
    sort_view(view, choice.sort);
    screen.draw(to_lines(view, choice.connections), choice.first);
    const std::uint64_t now = monotonic_ns();
    timeout(next > now ? static_cast<int>((next - now) / kNanosecondsPerMillisecond) + 1 : 0);
    const int key = getch();
    if (key != ERR) process_key(key, choice);
    if (monotonic_ns() < next) continue;
    view = sampler.sample();
    next = monotonic_ns() + interval_ns;
  }
}

}  // namespace verbatim::top
