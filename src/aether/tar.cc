// SPDX-License-Identifier: Apache-2.0
#include "aether/tar.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

namespace dsec::aether {
namespace {

struct Field {
  size_t offset;
  size_t size;
};
// The ustar header, POSIX.1-2008 "ustar Interchange Format".
constexpr Field kName{0, 100}, kMode{100, 8}, kUid{108, 8}, kGid{116, 8}, kSize{124, 12},
    kMtime{136, 12}, kChecksum{148, 8}, kLink{157, 100}, kPrefix{345, 155};
constexpr size_t kType = 156;
constexpr size_t kMagic = 257;
constexpr uint64_t kMaxOctalSize = 077777777777;
constexpr uint64_t kMaxFileSize = uint64_t{1} << 62;
constexpr int64_t kNanos = 1'000'000'000;

Error Malformed(std::string message) {
  return Error(Code::kInvalidArgument, "archive.malformed", std::move(message));
}

std::string_view Text(const char* block, Field field) {
  std::string_view text(block + field.offset, field.size);
  return text.substr(0, text.find('\0'));
}

void PutText(std::string& block, Field field, std::string_view text) {
  block.replace(field.offset, std::min(text.size(), field.size), text.substr(0, field.size));
}

void PutOctal(std::string& block, Field field, uint64_t value) {
  PutText(block, field, fmt::format("{:0{}o}", value, field.size - 1));
}

uint64_t Checksum(const char* block) {
  uint64_t sum = 0;
  for (size_t i = 0; i < kTarBlock; ++i) {
    bool own = i >= kChecksum.offset && i < kChecksum.offset + kChecksum.size;
    sum += own ? uint64_t{' '} : static_cast<unsigned char>(block[i]);
  }
  return sum;
}

// Octal, or GNU's base 256 when the first bit is set; negative numbers are 0.
std::optional<uint64_t> Number(const char* block, Field field) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(block + field.offset);
  if (bytes[0] == 0xff) return 0;
  uint64_t value = 0;
  if ((bytes[0] & 0x80) != 0) {
    for (size_t i = 0; i < field.size; ++i) {
      uint64_t byte = i == 0 ? bytes[0] & 0x7fu : bytes[i];
      if (value >> 54 != 0) return std::nullopt;
      value = value << 8 | byte;
    }
    return value;
  }
  std::string_view text = Text(block, field);
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  for (char digit : text) {
    if (digit < '0' || digit > '7') return std::nullopt;
    value = value << 3 | static_cast<uint64_t>(digit - '0');
  }
  return value;
}

std::optional<uint64_t> Decimal(std::string_view text) {
  uint64_t value = 0;
  auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || failure != std::errc() || end != text.data() + text.size())
    return std::nullopt;
  return value;
}

// "seconds[.fraction]", perhaps negative; what does not fit 64 bits of nanoseconds is refused.
std::optional<int64_t> Time(std::string_view text) {
  bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  size_t dot = text.find('.');
  std::optional<uint64_t> seconds = Decimal(text.substr(0, dot));
  if (!seconds || *seconds > 9'000'000'000u) return std::nullopt;
  int64_t nanos = 0;
  if (dot != std::string_view::npos) {
    std::string fraction(text.substr(dot + 1, 9));
    fraction.resize(9, '0');
    std::optional<uint64_t> parsed = Decimal(fraction);
    if (!parsed) return std::nullopt;
    nanos = static_cast<int64_t>(*parsed);
  }
  int64_t time = static_cast<int64_t>(*seconds) * kNanos + nanos;
  return negative ? -time : time;
}

// "<length> <key>=<value>\n", the length counting itself.
void AddRecord(std::string& records, std::string_view key, std::string_view value) {
  size_t body = key.size() + value.size() + 3;
  size_t length = body + 1;
  while (fmt::formatted_size("{}", length) + body != length) ++length;
  records += fmt::format("{} {}=", length, key);
  records += value;
  records += '\n';
}

std::string HeaderBlock(char type, std::string_view name, std::string_view link,
                        const TarEntry& entry, uint64_t size) {
  std::string block(kTarBlock, '\0');
  PutText(block, kName, name);
  PutOctal(block, kMode, entry.mode & 07777);
  PutOctal(block, kUid, std::min(entry.uid, 07777777u));
  PutOctal(block, kGid, std::min(entry.gid, 07777777u));
  PutOctal(block, kSize, std::min(size, kMaxOctalSize));
  PutOctal(block, kMtime,
           static_cast<uint64_t>(std::max<int64_t>(0, entry.mtime_ns / kNanos)) & kMaxOctalSize);
  block[kType] = type;
  PutText(block, kLink, link);
  block.replace(kMagic, 8, std::string_view("ustar\00000", 8));
  std::string sum = fmt::format("{:06o}", Checksum(block.data()));
  block.replace(kChecksum.offset, 8, sum + std::string("\0 ", 2));
  return block;
}

char TypeFlag(TarEntry::Type type) {
  switch (type) {
    case TarEntry::Type::kFile:
      return '0';
    case TarEntry::Type::kHardlink:
      return '1';
    case TarEntry::Type::kSymlink:
      return '2';
    case TarEntry::Type::kDirectory:
      return '5';
    default:
      return '6';
  }
}

}  // namespace

std::string TarHeader(TarEntry& entry) {
  std::string records;
  std::string map;
  std::string_view name = entry.path;
  entry.stored = entry.type == TarEntry::Type::kFile ? entry.size : 0;
  if (!entry.map.empty()) {
    entry.stored = 0;
    map = fmt::format("{}\n", entry.map.size());
    for (auto [offset, size] : entry.map) {
      map += fmt::format("{}\n{}\n", offset, size);
      entry.stored += size;
    }
    map.append(TarPadding(map.size()), '\0');
    AddRecord(records, "GNU.sparse.major", "1");
    AddRecord(records, "GNU.sparse.minor", "0");
    AddRecord(records, "GNU.sparse.name", entry.path);
    AddRecord(records, "GNU.sparse.realsize", fmt::format("{}", entry.size));
  } else if (name.size() > kName.size) {
    AddRecord(records, "path", name);
  }
  if (entry.link.size() > kLink.size) AddRecord(records, "linkpath", entry.link);
  uint64_t body = map.size() + entry.stored;
  if (body > kMaxOctalSize) AddRecord(records, "size", fmt::format("{}", body));
  if (entry.mtime_ns < 0 || entry.mtime_ns % kNanos != 0) {
    int64_t magnitude = entry.mtime_ns < 0 ? -entry.mtime_ns : entry.mtime_ns;
    AddRecord(records, "mtime",
              fmt::format("{}{}.{:09}", entry.mtime_ns < 0 ? "-" : "", magnitude / kNanos,
                          magnitude % kNanos));
  }
  std::string out;
  if (!records.empty()) {
    TarEntry extended;
    out += HeaderBlock('x', "PaxHeaders/entry", "", extended, records.size());
    out += records;
    out.append(TarPadding(records.size()), '\0');
  }
  out += HeaderBlock(TypeFlag(entry.type), name, entry.link, entry, body);
  out += map;
  return out;
}

std::string TarEnd() { return std::string(2 * kTarBlock, '\0'); }

Result<void> TarReader::Feed(std::string_view data) {
  while (!data.empty() && !ended_) {
    if (state_ == State::kData) {
      std::string_view part =
          data.substr(0, static_cast<size_t>(std::min<uint64_t>(left_, data.size())));
      data.remove_prefix(part.size());
      DSEC_TRY_VOID(TakeData(part));
      continue;
    }
    if (state_ == State::kPadding) {
      size_t skipped = std::min(padding_, data.size());
      padding_ -= skipped;
      data.remove_prefix(skipped);
      if (padding_ == 0) state_ = State::kHeader;
      continue;
    }
    if (state_ == State::kExtended) {
      std::string_view part =
          data.substr(0, static_cast<size_t>(std::min<uint64_t>(left_, data.size())));
      extended_ += part;
      left_ -= part.size();
      data.remove_prefix(part.size());
      if (left_ == 0) DSEC_TRY_VOID(OnExtended());
      continue;
    }
    std::string_view part = data.substr(0, kTarBlock - block_.size());
    block_ += part;
    data.remove_prefix(part.size());
    if (block_.size() < kTarBlock) return Ok();
    std::string block = std::exchange(block_, {});
    DSEC_TRY_VOID(state_ == State::kHeader ? OnHeader(block) : TakeSparseMap(block));
  }
  return Ok();
}

Result<void> TarReader::Finish() {
  if (ended_ || (state_ == State::kHeader && block_.empty() && extended_type_ == 0)) return Ok();
  return Malformed("the archive ends in the middle of an entry");
}

Result<void> TarReader::OnHeader(std::string_view block) {
  const char* data = block.data();
  if (block.find_first_not_of('\0') == std::string_view::npos) {
    ended_ = std::exchange(zero_block_, true);
    return Ok();
  }
  zero_block_ = false;
  std::optional<uint64_t> sum = Number(data, kChecksum);
  if (!sum || *sum != Checksum(data)) return Malformed("a header has a wrong checksum");
  std::optional<uint64_t> size = Number(data, kSize);
  if (!size || *size > kMaxFileSize) return Malformed("a header has a bad size");
  char type = data[kType];
  if (type != 'x' && type != 'g' && type != 'L' && type != 'K')
    return BeginEntry(data, type, *size);
  if (*size > kMaxExtended)
    return Malformed(fmt::format("an extended header is over {} bytes", kMaxExtended));
  extended_type_ = type;
  extended_.clear();
  left_ = *size;
  state_ = State::kExtended;
  return left_ == 0 ? OnExtended() : Ok();
}

Result<void> TarReader::OnExtended() {
  std::string body = std::exchange(extended_, {});
  padding_ = TarPadding(body.size());
  state_ = padding_ > 0 ? State::kPadding : State::kHeader;
  if (extended_type_ == 'g') {
    extended_type_ = 0;
    return ApplyPax(body, true);
  }
  if (extended_type_ == 'x') return ApplyPax(body, false);
  body.resize(std::min(body.size(), body.find('\0')));
  if (body.size() >= kMaxPath) return Malformed("a name is too long");
  (extended_type_ == 'L' ? pending_.path : pending_.link) = std::move(body);
  return Ok();
}

Result<void> TarReader::ApplyPax(std::string_view records, bool global) {
  Pending& target = global ? global_ : pending_;
  while (!records.empty()) {
    size_t space = records.find(' ');
    std::optional<uint64_t> length =
        space == std::string_view::npos ? std::nullopt : Decimal(records.substr(0, space));
    if (!length || *length > records.size() || *length < space + 3 ||
        records[*length - 1] != '\n') {
      return Malformed("a pax record has a bad length");
    }
    std::string_view record = records.substr(space + 1, *length - space - 2);
    records.remove_prefix(*length);
    size_t equals = record.find('=');
    if (equals == std::string_view::npos) return Malformed("a pax record has no value");
    std::string_view key = record.substr(0, equals);
    std::string_view value = record.substr(equals + 1);
    bool good = true;
    auto number = [&](uint64_t& out, bool& has) {
      std::optional<uint64_t> parsed = Decimal(value);
      good = parsed.has_value() && *parsed <= kMaxFileSize;
      if (good) out = *parsed;
      has = good;
    };
    bool ignored = false;
    if (key == "path" || key == "linkpath" || key == "GNU.sparse.name") {
      good = value.size() < kMaxPath && value.find('\0') == std::string_view::npos;
      (key == "path" ? target.path : key == "linkpath" ? target.link : target.sparse_name) = value;
    } else if (key == "size") {
      number(target.size, target.has_size);
    } else if (key == "uid") {
      number(target.uid, target.has_uid);
    } else if (key == "gid") {
      number(target.gid, target.has_gid);
    } else if (key == "GNU.sparse.realsize") {
      number(target.real_size, ignored);
    } else if (key == "GNU.sparse.major") {
      target.sparse = value == "1";
      good = target.sparse;
    } else if (key == "GNU.sparse.map" || key == "GNU.sparse.offset" ||
               key == "GNU.sparse.numblocks") {
      good = false;
    } else if (key == "mtime") {
      std::optional<int64_t> time = Time(value);
      good = time.has_value();
      if (good) target.mtime_ns = *time;
      target.has_mtime = good;
    }
    if (!good) return Malformed(fmt::format("pax record {} cannot be used", key.substr(0, 64)));
  }
  return Ok();
}

Result<void> TarReader::BeginEntry(const char* block, char type, uint64_t size) {
  Pending extra = std::exchange(pending_, {});
  extended_type_ = 0;
  TarEntry entry;
  entry.path = Text(block, kName);
  bool ustar = std::memcmp(block + kMagic, "ustar", 5) == 0;
  // GNU uses the prefix's place for other things, and has "ustar " as its magic.
  if (ustar && block[kMagic + 5] == '\0' && !Text(block, kPrefix).empty()) {
    entry.path = fmt::format("{}/{}", Text(block, kPrefix), entry.path);
  }
  entry.link = Text(block, kLink);
  std::optional<uint64_t> mode = Number(block, kMode);
  std::optional<uint64_t> uid = Number(block, kUid);
  std::optional<uint64_t> gid = Number(block, kGid);
  std::optional<uint64_t> mtime = Number(block, kMtime);
  if (!mode || !uid || !gid || !mtime || *mtime > 9'000'000'000u)
    return Malformed("a header has a bad number");
  entry.mode = static_cast<uint32_t>(*mode & 07777);
  entry.mtime_ns = static_cast<int64_t>(*mtime) * kNanos;
  for (const Pending* source : {&global_, &extra}) {
    if (!source->path.empty()) entry.path = source->path;
    if (!source->link.empty()) entry.link = source->link;
    if (source->has_mtime) entry.mtime_ns = source->mtime_ns;
    if (source->has_uid) uid = source->uid;
    if (source->has_gid) gid = source->gid;
    if (source->has_size) size = source->size;
  }
  entry.uid = static_cast<uint32_t>(std::min<uint64_t>(*uid, UINT32_MAX));
  entry.gid = static_cast<uint32_t>(std::min<uint64_t>(*gid, UINT32_MAX));
  switch (type) {
    case '\0':
    case '0':
    case '7':
      entry.type = type == '\0' && entry.path.ends_with('/') ? TarEntry::Type::kDirectory
                                                             : TarEntry::Type::kFile;
      break;
    case '1':
      entry.type = TarEntry::Type::kHardlink;
      break;
    case '2':
      entry.type = TarEntry::Type::kSymlink;
      break;
    case '3':
    case '4':
      entry.type = TarEntry::Type::kDevice;
      break;
    case '5':
      entry.type = TarEntry::Type::kDirectory;
      break;
    case '6':
      entry.type = TarEntry::Type::kFifo;
      break;
    case 'S':
      return Malformed("sparse files of the old GNU format are not supported");
    default:
      entry.type = TarEntry::Type::kOther;
      break;
  }
  bool has_data = entry.type == TarEntry::Type::kFile || entry.type == TarEntry::Type::kOther;
  entry.stored = has_data ? size : 0;
  entry.size = entry.stored;
  entry_ = std::move(entry);
  range_ = 0;
  range_done_ = 0;
  if (extra.sparse && entry_.type == TarEntry::Type::kFile) {
    if (!extra.sparse_name.empty()) entry_.path = extra.sparse_name;
    entry_.size = extra.real_size;
    left_ = entry_.stored;
    map_text_.clear();
    numbers_.clear();
    map_numbers_ = 0;
    state_ = State::kSparseMap;
    return left_ == 0 ? Malformed("a sparse file without a map") : Ok();
  }
  return EnterData();
}

Result<void> TarReader::TakeSparseMap(std::string_view block) {
  if (left_ < kTarBlock) return Malformed("a sparse map is longer than its entry");
  left_ -= kTarBlock;
  map_text_ += block;
  while (map_numbers_ == 0 || numbers_.size() < map_numbers_) {
    size_t newline = map_text_.find('\n');
    if (newline == std::string::npos) {
      if (map_text_.size() > 32) return Malformed("a sparse map holds no number");
      return Ok();  // goes on in the next block
    }
    std::optional<uint64_t> number = Decimal(std::string_view(map_text_).substr(0, newline));
    if (!number) return Malformed("a sparse map holds no number");
    map_text_.erase(0, newline + 1);
    if (map_numbers_ > 0) {
      numbers_.push_back(*number);
    } else {
      if (*number == 0 || *number > kMaxSparseRanges)
        return Malformed("a sparse map has a bad number of ranges");
      map_numbers_ = *number * 2;
    }
  }
  map_text_.clear();
  entry_.stored = left_;
  uint64_t last = 0;
  uint64_t sum = 0;
  for (size_t i = 0; i < numbers_.size(); i += 2) {
    uint64_t offset = numbers_[i];
    uint64_t size = numbers_[i + 1];
    if (offset < last || offset > entry_.size || size > entry_.size - offset) {
      return Malformed("a sparse map leaves its file");
    }
    last = offset + size;
    sum += size;
    entry_.map.emplace_back(offset, size);
  }
  if (sum != entry_.stored) return Malformed("a sparse map does not match its data");
  numbers_.clear();
  return EnterData();
}

Result<void> TarReader::EnterData() {
  if (entry_.path.size() >= kMaxPath || entry_.link.size() >= kMaxPath)
    return Malformed("a name is too long");
  DSEC_TRY_VOID(sink_.OnEntry(entry_));
  left_ = entry_.stored;
  state_ = State::kData;
  return left_ == 0 ? EndEntry() : Ok();
}

Result<void> TarReader::TakeData(std::string_view data) {
  left_ -= data.size();
  while (!data.empty()) {
    uint64_t offset = entry_.stored - left_ - data.size();
    size_t size = data.size();
    if (!entry_.map.empty()) {
      while (range_done_ == entry_.map[range_].second) {
        ++range_;
        range_done_ = 0;
      }
      offset = entry_.map[range_].first + range_done_;
      size = static_cast<size_t>(std::min<uint64_t>(size, entry_.map[range_].second - range_done_));
      range_done_ += size;
    }
    DSEC_TRY_VOID(sink_.OnData(offset, data.substr(0, size)));
    data.remove_prefix(size);
  }
  return left_ == 0 ? EndEntry() : Ok();
}

Result<void> TarReader::EndEntry() {
  padding_ = TarPadding(entry_.stored);
  state_ = padding_ > 0 ? State::kPadding : State::kHeader;
  return sink_.OnEntryEnd();
}

}  // namespace dsec::aether
