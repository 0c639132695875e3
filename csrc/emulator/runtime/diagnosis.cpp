// Collects what was found. Sites are written as <+0xOFFSET>, which the Python side replaces by file and line.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "state.h"

namespace simt {
namespace {

constexpr std::size_t kMostDiagnoses = 100;

struct Diagnosis {
  std::string text;
  unsigned times;
};

std::vector<Diagnosis> diagnoses;
std::map<std::string, std::size_t> known;
std::string joined;

// The kernel, which launchers write in parentheses where it has several template arguments, and the thread.
std::string where() {
  std::string name = launch.name;
  if (name.size() > 2 && name.front() == '(' && name.back() == ')') name = name.substr(1, name.size() - 2);
  char text[96];
  const uint3 block = launch.block_index;
  int length = std::snprintf(text, sizeof text, ", block %u,%u,%u", block.x, block.y, block.z);
  if (running != nullptr) {
    const uint3 thread = running->index;
    length += std::snprintf(text + length, sizeof text - length, ", thread %u,%u,%u", thread.x, thread.y, thread.z);
  }
  return " [" + name + text + "]";
}

}  // namespace

std::string place(const char* file, int line) {
  const char* slash = std::strrchr(file, '/');
  return std::string(slash != nullptr ? slash + 1 : file) + ":" + std::to_string(line);
}

std::string mention(Site site) {
  char text[32];
  std::snprintf(text, sizeof text, "<+0x%x>", site);
  return site != 0 ? text : "an unknown line";
}

void report(const char* kind, const std::string& text, Site site) {
  const std::string key = std::string(kind) + (site != 0 ? mention(site) : text);
  const auto found = known.find(key);
  if (found != known.end()) {
    ++diagnoses[found->second].times;
    return;
  }
  if (diagnoses.size() == kMostDiagnoses) return;
  known.emplace(key, diagnoses.size());
  const std::string at = site != 0 ? " at " + mention(site) : "";
  diagnoses.push_back({std::string(kind) + ": " + text + at + where(), 1});
}

}  // namespace simt

// All diagnoses since the last call, a line each.
extern "C" const char* simt_take_diagnoses() {
  simt::joined.clear();
  for (const auto& diagnosis : simt::diagnoses) {
    simt::joined += diagnosis.text;
    if (diagnosis.times > 1) simt::joined += " (" + std::to_string(diagnosis.times) + " times)";
    simt::joined += "\n";
  }
  simt::diagnoses.clear();
  simt::known.clear();
  return simt::joined.c_str();
}
