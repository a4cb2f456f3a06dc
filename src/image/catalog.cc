// SPDX-License-Identifier: Apache-2.0
#include "image/catalog.h"

#include <sqlite3.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#include "image/sqlite.h"

namespace dsec::image {
namespace {

using sql::Execute;
using sql::Statement;
using sql::Transaction;

constexpr int kSchemaVersion = 1;
constexpr size_t kMinIdDigits = 12;
constexpr std::string_view kIdPrefix = "sha256:";

constexpr char kSchema[] = R"sql(
CREATE TABLE layers(
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, meta_bytes INTEGER NOT NULL, blob_bytes INTEGER NOT NULL,
  entries INTEGER NOT NULL, content_bytes INTEGER NOT NULL, created_unix_ms INTEGER NOT NULL,
  source TEXT NOT NULL, config TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE names(
  name TEXT NOT NULL, tag TEXT NOT NULL, layer TEXT NOT NULL REFERENCES layers(id) ON DELETE CASCADE,
  PRIMARY KEY(name, tag)) WITHOUT ROWID;
CREATE INDEX names_by_layer ON names(layer);
CREATE TABLE labels(
  layer TEXT NOT NULL REFERENCES layers(id) ON DELETE CASCADE, key TEXT NOT NULL, value TEXT NOT NULL,
  PRIMARY KEY(layer, key)) WITHOUT ROWID;
PRAGMA user_version = 1;
)sql";

// Added after the first release of the schema; a program that does not know them works, too.
constexpr char kAdded[] = R"sql(
CREATE INDEX IF NOT EXISTS layers_by_kind ON layers(kind, id);
CREATE INDEX IF NOT EXISTS labels_by_value ON labels(key, value, layer);
CREATE TABLE IF NOT EXISTS unnamed(
  layer TEXT PRIMARY KEY REFERENCES layers(id) ON DELETE CASCADE, since_unix_ms INTEGER NOT NULL)
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lowers(
  layer TEXT NOT NULL REFERENCES layers(id) ON DELETE CASCADE, place INTEGER NOT NULL, lower TEXT NOT NULL,
  PRIMARY KEY(layer, place)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lowers_by_lower ON lowers(lower);
)sql";

// A filter that fits at most so many layers is the one that a listing starts from. One that fits
// more is looked up for each layer on the way, where a page's worth is soon found.
constexpr uint64_t kFew = 2000;
// Answers of Find that are kept.
constexpr size_t kMaxFound = 4096;

constexpr char kColumns[] =
    "id, kind, meta_bytes, blob_bytes, entries, content_bytes, created_unix_ms, source, config";

Error NotFound(std::string_view ref) {
  return Error(Code::kNotFound, "layer.not_found",
               fmt::format("no layer \"{}\" in the store", Printable(ref)));
}

}  // namespace

class Catalog::Impl {
 public:
  ~Impl() {
    version_.reset();
    ::sqlite3_close_v2(db_);
  }

  Result<void> Open(const std::string& path) {
    DSEC_TRY_VOID(sql::Open(path, &db_));
    DSEC_TRY_VOID(Execute(db_, "PRAGMA foreign_keys = ON; PRAGMA synchronous = FULL;"));
    Transaction transaction(db_);
    DSEC_TRY_VOID(transaction.Begin());
    uint64_t version = 0;
    {
      Statement ask(db_, "PRAGMA user_version");
      DSEC_TRY_VOID(ask.Step());
      version = ask.NumberAt(0);
    }
    if (version == 0) {
      DSEC_TRY_VOID(Execute(db_, kSchema));
      created_ = true;
    } else if (version != kSchemaVersion) {
      return Error(
          Code::kFailedPrecondition, "layer.catalog_version",
          fmt::format("{} has schema {}, this program knows {}", path, version, kSchemaVersion));
    }
    DSEC_TRY_VOID(Execute(db_, kAdded));
    return transaction.Commit();
  }

  Result<void> Put(const LayerInfo& layer, const std::optional<LayerName>& name) {
    const std::lock_guard lock(mutex_);
    found_.clear();
    Transaction transaction(db_);
    DSEC_TRY_VOID(transaction.Begin());
    Statement insert(db_, "INSERT OR IGNORE INTO layers VALUES(?,?,?,?,?,?,?,?,?)");
    insert.Text(layer.id.str()).Text(KindName(layer.kind)).Number(layer.meta_bytes);
    insert.Number(layer.blob_bytes).Number(layer.entries).Number(layer.content_bytes);
    insert.Number(static_cast<uint64_t>(layer.created_unix_ms)).Text(layer.source);
    insert.Text(EncodeConfig(layer.config));
    DSEC_TRY_VOID(insert.Run());
    Statement built(db_, "INSERT OR REPLACE INTO unnamed VALUES(?,?)");
    built.Text(layer.id.str()).Number(static_cast<uint64_t>(layer.created_unix_ms));
    DSEC_TRY_VOID(built.Run());
    for (size_t i = 0; i < layer.lower.size(); ++i) {
      Statement lower(db_, "INSERT OR REPLACE INTO lowers VALUES(?,?,?)");
      DSEC_TRY_VOID(lower.Text(layer.id.str()).Number(i).Text(layer.lower[i].str()).Run());
    }
    for (const auto& [key, value] : layer.labels) {
      Statement label(db_, "INSERT OR REPLACE INTO labels VALUES(?,?,?)");
      DSEC_TRY_VOID(label.Text(layer.id.str()).Text(key).Text(value).Run());
    }
    if (name) {
      Statement other(
          db_, "SELECT kind FROM names JOIN layers ON id = layer WHERE name = ? AND tag = ?");
      DSEC_TRY(const bool taken, other.Text(name->name).Text(name->tag).Step());
      if (taken && other.TextAt(0) != KindName(layer.kind)) {
        return Error(Code::kConflict, "layer.kind_conflict",
                     fmt::format("{} names a {}; remove it before it names a {}", name->str(),
                                 other.TextAt(0), KindName(layer.kind)))
            .WithField("name");
      }
      if (taken) {
        DSEC_TRY_VOID(Leave(*name, layer.created_unix_ms));
      }
      Statement point(db_, "INSERT OR REPLACE INTO names VALUES(?,?,?)");
      DSEC_TRY_VOID(point.Text(name->name).Text(name->tag).Text(layer.id.str()).Run());
    }
    return transaction.Commit();
  }

  Result<LayerInfo> Find(std::string_view ref) {
    const std::lock_guard lock(mutex_);
    DSEC_TRY_VOID(DropStale());
    const auto known = found_.find(ref);
    if (known != found_.end()) return known->second;
    auto layer = Select(ref);
    if (!layer.ok()) return layer;
    if (found_.size() >= kMaxFound) found_.clear();
    found_.emplace(ref, *layer);
    return layer;
  }

  Result<std::vector<LayerInfo>> List(const ListFilter& filter) {
    const std::lock_guard lock(mutex_);
    std::string sql = fmt::format("SELECT {} FROM layers WHERE id > ?", kColumns);
    std::vector<std::string> values = {filter.after};
    if (filter.kind) {
      sql += " AND kind = ?";
      values.emplace_back(KindName(*filter.kind));
    }
    if (const std::string& prefix = filter.prefix; !prefix.empty()) {
      const Condition names = NamesThatBegin(prefix);
      DSEC_TRY(const std::string fits, Fits(names));
      if (prefix.starts_with(kIdPrefix) || kIdPrefix.starts_with(prefix)) {
        sql += " AND (id >= ? AND id < ? OR " + fits + ")";
        values.insert(values.end(), {prefix, End(prefix)});
      } else {
        sql += " AND " + fits;
      }
      std::ranges::copy(names.values, std::back_inserter(values));
    }
    for (const auto& [key, value] : filter.labels) {
      const Condition labelled{"labels", "key = ? AND value = ?", {key, value}};
      DSEC_TRY(const std::string fits, Fits(labelled));
      sql += " AND " + fits;
      std::ranges::copy(labelled.values, std::back_inserter(values));
    }
    sql += " ORDER BY id";
    if (filter.limit != 0) sql += fmt::format(" LIMIT {}", filter.limit);
    Statement select(db_, sql);
    for (const std::string& value : values) select.Text(value);
    std::vector<LayerInfo> list;
    while (true) {
      DSEC_TRY(const bool more, select.Step());
      if (!more) return list;
      DSEC_TRY(LayerInfo layer, Read(select));
      list.push_back(std::move(layer));
    }
  }

  Result<void> RemoveName(const LayerName& name) {
    const std::lock_guard lock(mutex_);
    found_.clear();
    Statement remove(db_, "DELETE FROM names WHERE name = ? AND tag = ?");
    return remove.Text(name.name).Text(name.tag).Run();
  }

  Result<std::vector<Unnamed>> ListUnnamed() {
    const std::lock_guard lock(mutex_);
    Statement select(db_,
                     "SELECT id, meta_bytes + blob_bytes, "
                     "max(created_unix_ms, coalesce(since_unix_ms, 0)) "
                     "FROM layers LEFT JOIN unnamed ON unnamed.layer = id "
                     "WHERE NOT EXISTS(SELECT 1 FROM names WHERE names.layer = id) "
                     "AND NOT EXISTS(SELECT 1 FROM lowers WHERE lowers.lower = id) ORDER BY id");
    std::vector<Unnamed> list;
    while (true) {
      DSEC_TRY(const bool more, select.Step());
      if (!more) return list;
      list.push_back({LayerId(select.TextAt(0)), select.NumberAt(1),
                      static_cast<int64_t>(select.NumberAt(2))});
    }
  }

  Result<std::optional<LayerId>> UpperOf(const LayerId& id) {
    const std::lock_guard lock(mutex_);
    Statement find(db_, "SELECT layer FROM lowers WHERE lower = ? LIMIT 1");
    DSEC_TRY(const bool found, find.Text(id.str()).Step());
    return found ? std::optional(LayerId(find.TextAt(0))) : std::nullopt;
  }

  Result<void> SeenInUse(const std::vector<LayerId>& ids, int64_t now) {
    const std::lock_guard lock(mutex_);
    Transaction transaction(db_);
    DSEC_TRY_VOID(transaction.Begin());
    for (const LayerId& id : ids) {
      Statement note(db_, "INSERT OR REPLACE INTO unnamed SELECT id, ? FROM layers WHERE id = ?");
      DSEC_TRY_VOID(note.Number(static_cast<uint64_t>(now)).Text(id.str()).Run());
    }
    return transaction.Commit();
  }

  Result<void> RemoveLayer(const LayerId& id) {
    const std::lock_guard lock(mutex_);
    found_.clear();
    Statement remove(db_, "DELETE FROM layers WHERE id = ?");
    return remove.Text(id.str()).Run();
  }

  bool created() const { return created_; }

 private:
  // Forgets what was found when another connection has changed the file since.
  Result<void> DropStale() {
    if (!version_) version_.emplace(db_, "PRAGMA data_version");
    DSEC_TRY(const bool row, version_->Again());
    const uint64_t version = row ? version_->NumberAt(0) : 0;
    version_->Rewind();
    if (version != seen_version_) found_.clear();
    seen_version_ = version;
    return Ok();
  }

  // Notes when the layer that has the name is about to lose it.
  Result<void> Leave(const LayerName& name, int64_t now) {
    Statement note(db_,
                   "INSERT OR REPLACE INTO unnamed SELECT layer, ? FROM names "
                   "WHERE name = ? AND tag = ?");
    return note.Number(static_cast<uint64_t>(now)).Text(name.name).Text(name.tag).Run();
  }

  Result<LayerInfo> Select(std::string_view ref) {
    if (ref.starts_with(kIdPrefix)) {
      const std::string_view hex = ref.substr(kIdPrefix.size());
      const bool digits = std::ranges::all_of(
          hex, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
      if (!digits || hex.size() < kMinIdDigits || hex.size() > 64) return NotFound(ref);
      // 'g' follows the hex digits: the range holds all ids that start with ref.
      Statement select(
          db_, fmt::format("SELECT {} FROM layers WHERE id >= ?1 AND id < ?1 || 'g'", kColumns));
      DSEC_TRY(const bool found, select.Text(ref).Step());
      if (!found) return NotFound(ref);
      DSEC_TRY(LayerInfo layer, Read(select));
      DSEC_TRY(const bool more, select.Step());
      if (more) {
        return Error(Code::kInvalidArgument, "layer.ambiguous_ref",
                     fmt::format("more than one layer id starts with {}", ref));
      }
      return layer;
    }
    DSEC_TRY(const LayerName name, ParseLayerName(ref));
    Statement select(db_, fmt::format("SELECT {} FROM layers WHERE id = "
                                      "(SELECT layer FROM names WHERE name = ? AND tag = ?)",
                                      kColumns));
    DSEC_TRY(const bool found, select.Text(name.name).Text(name.tag).Step());
    if (!found) return NotFound(ref);
    return Read(select);
  }

  // Rows of `table` whose layer fits.
  struct Condition {
    std::string table;
    std::string where;
    std::vector<std::string> values;
  };

  // Names are printable ASCII: what begins with a text lies between it and it with a DEL.
  static std::string End(std::string_view prefix) { return std::string(prefix) + '\x7f'; }

  static Condition NamesThatBegin(const std::string& prefix) {
    const size_t colon = prefix.find(':');
    if (colon == std::string::npos) {
      return {"names", "name >= ? AND name < ?", {prefix, End(prefix)}};
    }
    const std::string tag = prefix.substr(colon + 1);
    return {"names", "name = ? AND tag >= ? AND tag < ?", {prefix.substr(0, colon), tag, End(tag)}};
  }

  // An expression over a row of layers.
  Result<std::string> Fits(const Condition& condition) {
    Statement count(db_, fmt::format("SELECT count(*) FROM (SELECT 1 FROM {} WHERE {} LIMIT {})",
                                     condition.table, condition.where, kFew + 1));
    for (const std::string& value : condition.values) count.Text(value);
    DSEC_TRY_VOID(count.Step());
    if (count.NumberAt(0) <= kFew) {
      return fmt::format("id IN (SELECT layer FROM {} WHERE {})", condition.table, condition.where);
    }
    return fmt::format("EXISTS(SELECT 1 FROM {} WHERE layer = layers.id AND {})", condition.table,
                       condition.where);
  }

  Result<LayerInfo> Read(const Statement& row) {
    LayerInfo layer;
    layer.id = LayerId(row.TextAt(0));
    DSEC_TRY(layer.kind, ParseKind(row.TextAt(1)));
    layer.meta_bytes = row.NumberAt(2);
    layer.blob_bytes = row.NumberAt(3);
    layer.entries = row.NumberAt(4);
    layer.content_bytes = row.NumberAt(5);
    layer.created_unix_ms = static_cast<int64_t>(row.NumberAt(6));
    layer.source = row.TextAt(7);
    DSEC_TRY(layer.config, DecodeConfig(row.TextAt(8)));
    Statement names(db_,
                    "SELECT name || ':' || tag AS full FROM names WHERE layer = ? ORDER BY full");
    names.Text(layer.id.str());
    while (true) {
      DSEC_TRY(const bool more, names.Step());
      if (!more) break;
      layer.names.push_back(names.TextAt(0));
    }
    Statement labels(db_, "SELECT key, value FROM labels WHERE layer = ?");
    labels.Text(layer.id.str());
    while (true) {
      DSEC_TRY(const bool more, labels.Step());
      if (!more) break;
      layer.labels[labels.TextAt(0)] = labels.TextAt(1);
    }
    Statement lower(db_, "SELECT lower FROM lowers WHERE layer = ? ORDER BY place");
    lower.Text(layer.id.str());
    while (true) {
      DSEC_TRY(const bool more, lower.Step());
      if (!more) break;
      layer.lower.emplace_back(lower.TextAt(0));
    }
    return layer;
  }

  std::mutex mutex_;
  sqlite3* db_ = nullptr;
  bool created_ = false;
  // What Find has answered since the file was changed last: a create asks for each of its layers
  // twice.
  std::map<std::string, LayerInfo, std::less<>> found_;
  std::optional<Statement> version_;
  uint64_t seen_version_ = 0;
};

Catalog::Catalog(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Catalog::~Catalog() = default;

Result<std::unique_ptr<Catalog>> Catalog::Open(const std::string& path) {
  auto impl = std::make_unique<Impl>();
  DSEC_TRY_VOID(impl->Open(path));
  return std::unique_ptr<Catalog>(new Catalog(std::move(impl)));
}

bool Catalog::created() const { return impl_->created(); }
Result<void> Catalog::Put(const LayerInfo& layer, const std::optional<LayerName>& name) {
  return impl_->Put(layer, name);
}
Result<LayerInfo> Catalog::Find(std::string_view ref) const { return impl_->Find(ref); }
Result<std::vector<LayerInfo>> Catalog::List(const ListFilter& filter) const {
  return impl_->List(filter);
}
Result<void> Catalog::RemoveName(const LayerName& name) { return impl_->RemoveName(name); }
Result<std::vector<Catalog::Unnamed>> Catalog::ListUnnamed() const { return impl_->ListUnnamed(); }
Result<std::optional<LayerId>> Catalog::UpperOf(const LayerId& id) const {
  return impl_->UpperOf(id);
}
Result<void> Catalog::SeenInUse(const std::vector<LayerId>& ids, int64_t now_unix_ms) {
  return impl_->SeenInUse(ids, now_unix_ms);
}
Result<void> Catalog::RemoveLayer(const LayerId& id) { return impl_->RemoveLayer(id); }

}  // namespace dsec::image
