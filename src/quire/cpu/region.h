// The target-region pair: functions between them may use the named instructions, the rest of the library may not.
// Include every standard header before a region opens, so that no shared inline function is compiled inside one.
#pragma once

#define QUIRE_PRAGMA(text) _Pragma(#text)
#define QUIRE_REGION_BEGIN(features) QUIRE_PRAGMA(GCC push_options) QUIRE_PRAGMA(GCC target(features))
#define QUIRE_REGION_END QUIRE_PRAGMA(GCC pop_options)
