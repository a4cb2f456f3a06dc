// SPDX-License-Identifier: Apache-2.0
#include "base/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/utf8.h"

namespace dsec::metrics {
namespace {

constexpr size_t kMaxLabelValue = 256;

bool IsName(std::string_view text, bool colon_allowed) {
  if (text.empty() || (text[0] >= '0' && text[0] <= '9')) return false;
  return std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           (c == ':' && colon_allowed);
  });
}

// The text inside the braces, which also identifies the series. Invalid UTF-8 becomes U+FFFD; a
// value is cut to kMaxLabelValue bytes.
std::string RenderLabels(Labels labels) {
  std::sort(labels.begin(), labels.end());
  std::string out;
  for (const auto& [key, value] : labels) {
    DSEC_CHECK(IsName(key, false) && !key.starts_with("__") && key != "le");
    if (!out.empty()) out += ',';
    out += key;
    out += "=\"";
    std::string_view rest = std::string_view(value).substr(0, kMaxLabelValue);
    while (!rest.empty()) {
      const size_t length = Utf8SequenceLength(rest);
      if (length == 0) {
        out += "\xef\xbf\xbd";
      } else if (rest[0] == '\\' || rest[0] == '"') {
        out += '\\';
        out += rest[0];
      } else if (rest[0] == '\n') {
        out += "\\n";
      } else {
        out += rest.substr(0, length);
      }
      rest.remove_prefix(std::max<size_t>(length, 1));
    }
    out += '"';
  }
  return out;
}

std::string EscapeHelp(std::string_view help) {
  std::string out;
  for (char c : help) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

std::string Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

void AppendSample(std::string& out, std::string_view name, std::string_view suffix,
                  std::string_view labels, std::string_view extra_label, std::string_view value) {
  out += name;
  out += suffix;
  if (!labels.empty() || !extra_label.empty()) {
    out += '{';
    out += labels;
    if (!labels.empty() && !extra_label.empty()) out += ',';
    out += extra_label;
    out += '}';
  }
  out += ' ';
  out += value;
  out += '\n';
}

}  // namespace

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(new std::atomic<uint64_t>[bounds_.size() + 1]()) {
  DSEC_CHECK(std::is_sorted(bounds_.begin(), bounds_.end()));
}

void Histogram::Observe(double value) {
  const size_t index = static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) -
                                           bounds_.begin());
  counts_[index].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

std::vector<uint64_t> Histogram::counts() const {
  std::vector<uint64_t> out(bounds_.size() + 1);
  for (size_t i = 0; i < out.size(); ++i) out[i] = counts_[i].load(std::memory_order_relaxed);
  return out;
}

std::vector<double> LatencyBounds() {
  return {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
          0.1,    0.25,    0.5,    1,     2.5,    5,     10,   30,    60};
}

// Exactly one of the three is set, by the kind of the family.
struct Registry::Series {
  std::unique_ptr<Counter> counter;
  std::unique_ptr<Gauge> gauge;
  std::unique_ptr<Histogram> histogram;
};

struct Registry::Family {
  Kind kind;
  std::string help;
  std::vector<double> bounds;
  std::map<std::string, Series, std::less<>> series;
};

Registry::Registry() = default;
Registry::~Registry() = default;

Registry& Registry::Global() {
  // Never destroyed: threads may still count while static objects go.
  static Registry* const kRegistry = new Registry();
  return *kRegistry;
}

Registry::Series& Registry::Find(Kind kind, std::string_view name, std::string_view help,
                                 Labels labels, const std::vector<double>& bounds) {
  DSEC_CHECK(IsName(name, true));
  std::string rendered = RenderLabels(labels);
  const std::lock_guard lock(mutex_);
  auto found = families_.find(name);
  if (found == families_.end()) {
    auto family = std::make_unique<Family>();
    family->kind = kind;
    family->help = help;
    family->bounds = bounds;
    found = families_.emplace(std::string(name), std::move(family)).first;
  }
  Family& family = *found->second;
  DSEC_CHECK(family.kind == kind);
  auto series = family.series.find(rendered);
  if (series != family.series.end()) return series->second;
  if (family.series.size() >= kMaxSeries) {
    for (auto& [key, value] : labels) value = "overflow";
    rendered = RenderLabels(std::move(labels));
  }
  Series& slot = family.series[rendered];
  switch (kind) {
    case Kind::kCounter:
      if (!slot.counter) slot.counter = std::make_unique<Counter>();
      break;
    case Kind::kGauge:
      if (!slot.gauge) slot.gauge = std::make_unique<Gauge>();
      break;
    case Kind::kHistogram:
      if (!slot.histogram) slot.histogram = std::make_unique<Histogram>(family.bounds);
      break;
  }
  return slot;
}

Counter& Registry::GetCounter(std::string_view name, std::string_view help, Labels labels) {
  return *Find(Kind::kCounter, name, help, std::move(labels), {}).counter;
}

Gauge& Registry::GetGauge(std::string_view name, std::string_view help, Labels labels) {
  return *Find(Kind::kGauge, name, help, std::move(labels), {}).gauge;
}

Histogram& Registry::GetHistogram(std::string_view name, std::string_view help,
                                  const std::vector<double>& bounds, Labels labels) {
  return *Find(Kind::kHistogram, name, help, std::move(labels), bounds).histogram;
}

std::string Registry::RenderPrometheus() const {
  std::string out;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, family] : families_) {
    const std::string_view type = family->kind == Kind::kCounter ? "counter"
                                  : family->kind == Kind::kGauge ? "gauge"
                                                                 : "histogram";
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, EscapeHelp(family->help), name, type);
    for (const auto& [labels, series] : family->series) {
      if (series.counter) {
        AppendSample(out, name, "", labels, "", fmt::format("{}", series.counter->value()));
      } else if (series.gauge) {
        AppendSample(out, name, "", labels, "", Number(series.gauge->value()));
      } else {
        const std::vector<uint64_t> counts = series.histogram->counts();
        uint64_t total = 0;
        for (size_t i = 0; i < counts.size(); ++i) {
          total += counts[i];
          const double bound = i < family->bounds.size() ? family->bounds[i] : INFINITY;
          AppendSample(out, name, "_bucket", labels, fmt::format("le=\"{}\"", Number(bound)),
                       fmt::format("{}", total));
        }
        AppendSample(out, name, "_sum", labels, "", Number(series.histogram->sum()));
        AppendSample(out, name, "_count", labels, "", fmt::format("{}", total));
      }
    }
  }
  return out;
}

}  // namespace dsec::metrics
