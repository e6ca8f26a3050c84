// Found in place of the compiler's: neon.h has all of it.
#pragma once
