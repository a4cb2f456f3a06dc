// SPDX-License-Identifier: Apache-2.0
#include "image/sqlite.h"

namespace dsec::image::sql {
namespace {

constexpr int kBusyMillis = 10'000;
constexpr char kWhat[] = "layer catalogue";

}  // namespace

Result<void> Open(const std::string& path, sqlite3** db) {
  if (::sqlite3_open_v2(path.c_str(), db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr) !=
      SQLITE_OK) {
    return Fail(*db, "open " + path);
  }
  ::sqlite3_busy_timeout(*db, kBusyMillis);
  return Ok();
}

Error Fail(sqlite3* db, std::string_view what) {
  const int code = db != nullptr ? ::sqlite3_errcode(db) : SQLITE_NOMEM;
  const char* text = db != nullptr ? ::sqlite3_errmsg(db) : "no memory";
  if (code == SQLITE_BUSY || code == SQLITE_LOCKED) {
    return Error(Code::kUnavailable, "layer.catalog_busy",
                 fmt::format("{}: another process holds the catalogue", what));
  }
  if (code == SQLITE_FULL) {
    return Error(Code::kResourceExhausted, "layer.no_space", fmt::format("{}: {}", what, text));
  }
  if (code == SQLITE_CORRUPT || code == SQLITE_NOTADB)
    return Error(Code::kInternal, "layer.catalog_damaged", fmt::format("{}: {}", what, text));
  return Error(Code::kInternal, "layer.catalog", fmt::format("{}: {}", what, text));
}

Result<void> Execute(sqlite3* db, const char* sql) {
  if (::sqlite3_exec(db, sql, nullptr, nullptr, nullptr) != SQLITE_OK) return Fail(db, kWhat);
  return Ok();
}

Statement::Statement(sqlite3* db, std::string_view sql) : db_(db) {
  status_ = ::sqlite3_prepare_v2(db, sql.data(), static_cast<int>(sql.size()), &handle_, nullptr);
}

Statement& Statement::Text(std::string_view text) {
  Keep(::sqlite3_bind_text64(handle_, ++bound_, text.data(), text.size(), SQLITE_TRANSIENT,
                             SQLITE_UTF8));
  return *this;
}

Statement& Statement::Number(uint64_t number) {
  Keep(::sqlite3_bind_int64(handle_, ++bound_, static_cast<sqlite3_int64>(number)));
  return *this;
}

Statement& Statement::Bytes(std::span<const uint8_t> bytes) {
  Keep(::sqlite3_bind_blob64(handle_, ++bound_, bytes.data(), bytes.size(), SQLITE_TRANSIENT));
  return *this;
}

Result<bool> Statement::Step() {
  if (status_ != SQLITE_OK) return Fail(db_, kWhat);
  const int status = ::sqlite3_step(handle_);
  if (status == SQLITE_ROW) return true;
  if (status == SQLITE_DONE) return false;
  return Fail(db_, kWhat);
}

Result<void> Statement::Run() {
  DSEC_TRY_VOID(Step());
  return Ok();
}

Result<bool> Statement::Again() {
  Rewind();
  return Step();
}

void Statement::Rewind() {
  ::sqlite3_reset(handle_);
  bound_ = 0;
}

std::string Statement::TextAt(int column) const {
  const auto* text = ::sqlite3_column_text(handle_, column);
  const auto size = static_cast<size_t>(::sqlite3_column_bytes(handle_, column));
  return text == nullptr ? std::string() : std::string(reinterpret_cast<const char*>(text), size);
}

uint64_t Statement::NumberAt(int column) const {
  return static_cast<uint64_t>(::sqlite3_column_int64(handle_, column));
}

std::span<const uint8_t> Statement::BytesAt(int column) const {
  const auto* bytes = static_cast<const uint8_t*>(::sqlite3_column_blob(handle_, column));
  const auto size = static_cast<size_t>(::sqlite3_column_bytes(handle_, column));
  return {bytes, bytes == nullptr ? 0 : size};
}

Transaction::~Transaction() {
  if (open_) ::sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
}

Result<void> Transaction::Begin() {
  DSEC_TRY_VOID(Execute(db_, "BEGIN IMMEDIATE"));
  open_ = true;
  return Ok();
}

Result<void> Transaction::Commit() {
  DSEC_TRY_VOID(Execute(db_, "COMMIT"));
  open_ = false;
  return Ok();
}

}  // namespace dsec::image::sql
