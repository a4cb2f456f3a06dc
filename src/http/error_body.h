// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "http/json_writer.h"

namespace dsec::http {

// Writes the public form of an error as one JSON object: code, reason, message, field?, retriable,
// request_id, details?. `details`: members of the object "details", ready-made JSON without braces;
// may be empty.
void WriteError(JsonWriter& json, const Error& error, std::string_view request_id,
                std::string_view details = {});
// {"error":{...}}
std::string ErrorBody(const Error& error, std::string_view request_id,
                      std::string_view details = {});

// What a client makes of a reply with an error status: code and reason of the body, or code by
// status and reason "http.status". Reasons are kept for the life of the process, at most 512
// different ones; further ones become "http.other".
Error ErrorFromReply(int status, std::string_view body);

}  // namespace dsec::http
