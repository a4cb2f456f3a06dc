// SPDX-License-Identifier: Apache-2.0
// The source that carries the precompiled headers of cmake/dsec.cmake.
