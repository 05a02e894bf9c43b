// SPDX-License-Identifier: Apache-2.0
/*
 * loader.c - what the dynamic linker has loaded, read from its own list and the objects' symbol
 * tables: the next definition of each call that we interpose, and the run-times beside which
 * nothing may be managed.
 *
 * Not dlsym(3): linked on a new system it asks for a version that no older C library has, and then
 * the program does not start at all. Nor dl_iterate_phdr(3), which a sanitizer's run-time or the
 * program may define itself and not be ready for yet. The list has had one layout since SVR4, and
 * musl's has the same.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>

#include "job/preload.h"

struct up_next up_next;

/* Weak, as is all that we ask of a C library: one that lacks it leaves 0 here. */
extern struct r_debug *_dl_debug_addr __attribute__((weak)); /* musl */
#pragma weak _r_debug

extern ElfW(Dyn) own_dynamic[] __asm__("_DYNAMIC") __attribute__((visibility("hidden")));

/* The high bit of a symbol's version: not the one for who asks for none (Elf*_Versym, gABI). */
#define VERSION_HIDDEN 0x8000

struct symbols {
	uintptr_t base;
	const ElfW(Sym) *table;
	const char *names;
	const uint16_t *versions;
	const uint32_t *gnu_hash, *hash;
};

static const struct link_map *first_object(void)
{
	if (&_r_debug && _r_debug.r_map)
		return _r_debug.r_map;
	return &_dl_debug_addr && _dl_debug_addr ? _dl_debug_addr->r_map : NULL;
}

/* glibc has added the object's base to the addresses in its dynamic section, musl has not, and in
 * the kernel's own object nobody has. */
static const void *address_of(const struct link_map *map, const ElfW(Dyn) *d)
{
	uintptr_t base = map->l_addr, value = d->d_un.d_ptr;

	return (const void *)(value < base ? base + value : value);
}

static int symbols_of(const struct link_map *map, struct symbols *s)
{
	*s = (struct symbols){ .base = map->l_addr };
	for (const ElfW(Dyn) *d = map->l_ld; d && d->d_tag != DT_NULL; d++) {
		if (d->d_tag == DT_SYMTAB)
			s->table = address_of(map, d);
		else if (d->d_tag == DT_STRTAB)
			s->names = address_of(map, d);
		else if (d->d_tag == DT_VERSYM)
			s->versions = address_of(map, d);
		else if (d->d_tag == DT_GNU_HASH)
			s->gnu_hash = address_of(map, d);
		else if (d->d_tag == DT_HASH)
			s->hash = address_of(map, d);
	}
	return s->table && s->names && (s->gnu_hash || s->hash);
}

/* The address of the symbol, if this entry defines it for who asks for no version. */
static void *defined(const struct symbols *s, uint32_t index, const char *name)
{
	const ElfW(Sym) *symbol = &s->table[index];
	int type = ELF64_ST_TYPE(symbol->st_info);

	if (symbol->st_shndx == SHN_UNDEF || (type != STT_FUNC && type != STT_NOTYPE) ||
	    (s->versions && s->versions[index] & VERSION_HIDDEN) ||
	    !up_same_text(s->names + symbol->st_name, name))
		return NULL;
	return (void *)(s->base + symbol->st_value);
}

/* DT_GNU_HASH: buckets, symbol offset, words and shift of a Bloom filter; the filter; the buckets;
 * one hash a symbol, whose lowest bit ends its chain. */
static void *find_by_gnu_hash(const struct symbols *s, const char *name)
{
	const uint32_t *header = s->gnu_hash;
	uint32_t buckets = header[0], offset = header[1], words = header[2], shift = header[3];
	const ElfW(Addr) *filter = (const void *)(header + 4);
	const uint32_t *bucket = (const void *)(filter + words), *chain = bucket + buckets;
	const unsigned int bits = 8 * sizeof(ElfW(Addr));
	uint32_t hash = 5381, index;
	ElfW(Addr) word;
	void *found = NULL;

	for (const char *c = name; *c; c++)
		hash = hash * 33 + (unsigned char)*c;
	if (!buckets || !words)
		return NULL;
	word = filter[hash / bits % words];
	if (!(word >> hash % bits & word >> (hash >> shift) % bits & 1))
		return NULL;
	index = bucket[hash % buckets];
	if (index < offset)
		return NULL;
	do
		if ((chain[index - offset] | 1) == (hash | 1))
			found = defined(s, index, name);
	while (!found && !(chain[index++ - offset] & 1));
	return found;
}

/* DT_HASH: number of buckets, of symbols; the buckets; the chains. */
static void *find_by_hash(const struct symbols *s, const char *name)
{
	const uint32_t *bucket = s->hash + 2, *chain = bucket + s->hash[0];
	uint32_t hash = 0;
	void *found = NULL;

	for (const char *c = name; *c; c++) {
		hash = (hash << 4) + (unsigned char)*c;
		hash = (hash ^ (hash >> 24 & 0xf0)) & 0x0fffffff;
	}
	if (!s->hash[0])
		return NULL;
	for (uint32_t i = bucket[hash % s->hash[0]]; i && !found; i = chain[i])
		found = defined(s, i, name);
	return found;
}

static void *find(const struct symbols *s, const char *name)
{
	return s->gnu_hash ? find_by_gnu_hash(s, name) : find_by_hash(s, name);
}

void up_load_next(const struct up_next_name *name, int count)
{
	const struct link_map *map = first_object();
	struct symbols s;

	while (map && map->l_ld != own_dynamic)
		map = map->l_next;
	for (map = map ? map->l_next : NULL; map; map = map->l_next) {
		if (!symbols_of(map, &s))
			continue;
		for (int i = 0; i < count; i++)
			if (!*name[i].call)
				*name[i].call = find(&s, name[i].name);
	}
}

static int has_text(const char *text, const char *part)
{
	for (; *text; text++) {
		const char *a = text, *b = part;

		while (*b && *a == *b)
			a++, b++;
		if (!*b)
			return 1;
	}
	return 0;
}

/* Code of the program that runs before all libraries' (DT_PREINIT_ARRAY): gcc's static run-times, which
 * tell no name of theirs, have it, and next to nobody else. */
static int begins_before_all(const struct link_map *program)
{
	for (const ElfW(Dyn) *d = program->l_ld; d && d->d_tag != DT_NULL; d++)
		if (d->d_tag == DT_PREINIT_ARRAYSZ && d->d_un.d_val)
			return 1;
	return 0;
}

enum up_left_alone up_run_time(void)
{
	static const struct {
		const char *symbol;
		enum up_left_alone why;
	} sanitizer[] = {
		{ "__asan_init", UP_ALONE_ASAN },     { "__tsan_init", UP_ALONE_TSAN },
		{ "__msan_init", UP_ALONE_MSAN },     { "__hwasan_init", UP_ALONE_ASAN },
		{ "__lsan_init", UP_ALONE_LSAN },
	};
	enum up_left_alone linked = UP_ALONE_NO;
	struct symbols s;

	for (const struct link_map *map = first_object(); map; map = map->l_next) {
		/* valgrind and rr preload objects of their own */
		if (map->l_name && has_text(map->l_name, "/vgpreload_"))
			return UP_ALONE_VALGRIND;
		if (map->l_name && has_text(map->l_name, "/librrpreload"))
			return UP_ALONE_RR;
		if (!symbols_of(map, &s))
			continue;
		if (!map->l_prev && begins_before_all(map) && find(&s, "pthread_create"))
			linked = UP_ALONE_LINKED;
		for (unsigned int i = 0; i < sizeof(sanitizer) / sizeof(sanitizer[0]); i++)
			if (find(&s, sanitizer[i].symbol))
				return sanitizer[i].why;
	}
	return linked;
}
