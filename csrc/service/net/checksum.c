// SPDX-License-Identifier: Apache-2.0
/*
 * checksum.c - CRC-32C by the processor's own instruction, and by a table where it has none.
 */
#include <string.h>

#include "common/net.h"

#define POLYNOMIAL 0x82f63b78u /* of CRC-32C, reflected */

static uint32_t by_table(uint32_t crc, const uint8_t *at, uint64_t length)
{
	static uint32_t table[256];
	static int made;

	if (!__atomic_load_n(&made, __ATOMIC_ACQUIRE)) { /* all who make it make the same */
		for (uint32_t i = 0; i < 256; i++) {
			uint32_t c = i;

			for (int bit = 0; bit < 8; bit++)
				c = c & 1 ? c >> 1 ^ POLYNOMIAL : c >> 1;
			__atomic_store_n(&table[i], c, __ATOMIC_RELAXED);
		}
		__atomic_store_n(&made, 1, __ATOMIC_RELEASE);
	}
	while (length--)
		crc = crc >> 8 ^ __atomic_load_n(&table[(crc ^ *at++) & 255], __ATOMIC_RELAXED);
	return crc;
}

#if defined(__x86_64__)
#define HARDWARE __attribute__((target("sse4.2")))
#define HAS_IT() __builtin_cpu_supports("sse4.2")
#define WORD(crc, word) ((uint32_t)__builtin_ia32_crc32di(crc, word))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define HARDWARE __attribute__((target("+crc")))
#define HAS_IT() (getauxval(AT_HWCAP) & 1 << 7) /* HWCAP_CRC32 */
#define WORD(crc, word) __builtin_aarch64_crc32cx(crc, word)
#endif

#ifdef HARDWARE
HARDWARE static uint32_t by_words(uint32_t crc, const uint8_t *at, uint64_t words)
{
	for (; words; words--, at += 8) {
		uint64_t word;

		memcpy(&word, at, 8);
		crc = WORD(crc, word);
	}
	return crc;
}
#endif

uint32_t up_net_checksum(const void *bytes, uint64_t length)
{
	const uint8_t *at = bytes;
	uint32_t crc = ~0u;

#ifdef HARDWARE
	if (HAS_IT()) {
		crc = by_words(crc, at, length / 8);
		at += length / 8 * 8;
		length %= 8;
	}
#endif
	return ~by_table(crc, at, length);
}
