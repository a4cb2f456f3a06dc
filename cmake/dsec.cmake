# SPDX-License-Identifier: Apache-2.0
# The project's own target helpers. Every folder under src/ is one library target dsec_<folder> with the alias
# dsec::<folder>; sources are listed, never globbed.

add_library(dsec_flags INTERFACE)
target_compile_options(dsec_flags INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror -fno-omit-frame-pointer
  $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual -Wnon-virtual-dtor>)
target_compile_options(dsec_flags INTERFACE -gline-tables-only)
target_include_directories(dsec_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_definitions(dsec_flags INTERFACE _FILE_OFFSET_BITS=64 DSEC_VERSION="${PROJECT_VERSION}")
target_link_options(dsec_flags INTERFACE -fuse-ld=lld)

add_library(dsec_sanitize INTERFACE)
if(DSEC_SANITIZE)
  target_compile_options(dsec_sanitize INTERFACE -fsanitize=${DSEC_SANITIZE} -fno-sanitize-recover=all)
  target_link_options(dsec_sanitize INTERFACE -fsanitize=${DSEC_SANITIZE})
endif()

# What the folders above runtime include anyway and what costs most of a compilation, parsed once. Only headers of others
# and generated ones: ours stay visible to the check that each compiles alone.
add_library(dsec_pch OBJECT EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/cmake/pch.cc)
target_precompile_headers(dsec_pch PRIVATE
  <algorithm> <chrono> <functional> <map> <memory> <optional> <string> <string_view> <unordered_map> <vector>
  <fmt/format.h>
  <boost/asio/any_io_executor.hpp> <boost/asio/awaitable.hpp> <boost/asio/co_spawn.hpp> <boost/asio/detached.hpp>
  <boost/asio/dispatch.hpp> <boost/asio/generic/stream_protocol.hpp> <boost/asio/io_context.hpp> <boost/asio/post.hpp>
  <boost/asio/posix/stream_descriptor.hpp> <boost/asio/redirect_error.hpp> <boost/asio/steady_timer.hpp>
  <boost/asio/this_coro.hpp> <boost/asio/use_awaitable.hpp> <boost/asio/write.hpp>
  <dsec/v1/aether.pb.h> <dsec/v1/edge.pb.h> <dsec/v1/model.pb.h>)
target_link_libraries(dsec_pch PRIVATE dsec_flags dsec_sanitize fmt::fmt dsec::proto Boost::headers)
target_compile_definitions(dsec_pch PRIVATE BOOST_ASIO_SEPARATE_COMPILATION BOOST_ASIO_NO_DEPRECATED)
target_compile_options(dsec_pch PRIVATE $<$<CXX_COMPILER_ID:Clang>:-Xclang -fno-pch-timestamp>)

# Gives a target the precompiled headers when it is of the part of the tree that includes them.
function(dsec_use_pch target)
  foreach(dep ${ARGN})
    if(dep MATCHES "^(dsec::(runtime|rpc|http|edge|edge_testing|cluster|sandbox|apiserver|cli|up)|dsec_sandbox_testing)$")
      target_precompile_headers(${target} REUSE_FROM dsec_pch)
      target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:Clang>:-Xclang -fno-pch-timestamp>)
      return()
    endif()
  endforeach()
endfunction()

# dsec_library(NAME SOURCES a.cc b.cc DEPS dsec::base ... [STATIC_SAFE])
# STATIC_SAFE: linked into the small static binaries that run next to sandboxes; built a second time without
# sanitizers as dsec_<name>_static.
function(dsec_library name)
  cmake_parse_arguments(ARG "STATIC_SAFE" "" "SOURCES;DEPS;STATIC_DEPS" ${ARGN})
  add_library(dsec_${name} STATIC ${ARG_SOURCES})
  add_library(dsec::${name} ALIAS dsec_${name})
  target_link_libraries(dsec_${name} PUBLIC dsec_sanitize ${ARG_DEPS} PRIVATE dsec_flags)
  target_include_directories(dsec_${name} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  dsec_use_pch(dsec_${name} ${ARG_DEPS})
  if(ARG_STATIC_SAFE)
    add_library(dsec_${name}_static STATIC ${ARG_SOURCES})
    target_link_libraries(dsec_${name}_static PUBLIC ${ARG_STATIC_DEPS} PRIVATE dsec_flags)
    target_compile_options(dsec_${name}_static PRIVATE -Os -ffunction-sections -fdata-sections)
    target_include_directories(dsec_${name}_static PUBLIC ${CMAKE_SOURCE_DIR}/src)
  endif()
endfunction()

# What runs under the sanitizers: all that `make asan` and `make tsan` build.
add_custom_target(dsec_fast_tests)

# dsec_test(NAME LABEL SOURCES ... DEPS ...): one GoogleTest binary, one ctest entry with that label.
# LABEL is one of unit, component, privileged, system, chaos, security, fuzz, vm, lint.
function(dsec_test name label)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dsec_flags dsec_sanitize GTest::gtest GTest::gmock GTest::gtest_main
                        Threads::Threads)
  dsec_use_pch(${name} ${ARG_DEPS})
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${ARG_TIMEOUT})
  if(label MATCHES "^(unit|component)$")
    add_dependencies(dsec_fast_tests ${name})
  endif()
  if(NOT label STREQUAL "unit")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

# dsec_fuzz(NAME SOURCES ... DEPS ... CORPUS dir): libFuzzer target; ctest runs the corpus plus a bounded number of new
# inputs. Without DSEC_FUZZ nothing is built.
function(dsec_fuzz name)
  cmake_parse_arguments(ARG "" "CORPUS" "SOURCES;DEPS" ${ARGN})
  if(NOT DSEC_FUZZ)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dsec_flags dsec_sanitize)
  add_dependencies(dsec_fast_tests ${name})
  target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  # What it finds goes to the first folder, in the build tree; the corpus itself is only read.
  set(found ${CMAKE_CURRENT_BINARY_DIR}/${name}_found)
  file(MAKE_DIRECTORY ${found})
  add_test(NAME ${name} COMMAND ${name} -runs=20000 -max_total_time=20 -rss_limit_mb=1024 ${found} ${ARG_CORPUS}
           WORKING_DIRECTORY ${found})
  set_tests_properties(${name} PROPERTIES LABELS fuzz TIMEOUT 120)
endfunction()

# dsec_static_binary(NAME SOURCES ... DEPS ...): a static, non-PIE binary without sanitizers, for code that runs beside
# or above a sandbox and must be small (spawner, aether, floor programs of the benchmarks).
function(dsec_static_binary name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dsec_flags)
  target_compile_options(${name} PRIVATE -Os -ffunction-sections -fdata-sections)
  target_link_options(${name} PRIVATE -static -no-pie -Wl,--gc-sections -Wl,-z,norelro)
endfunction()
