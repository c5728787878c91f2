// What a program includes that tries everything: the public headers, and what the lines of list.txt
// assume.
#pragma once
#include <fmt/core.h>

#include <iostream>
#include <memory>
#include <vector>

#include "collectives/ops.h"
#include "collectives/process_group.h"
#include "compile/compile.h"
#include "core/core.h"
#include "core/io/safetensors.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/sampler.h"

using namespace tessera;
