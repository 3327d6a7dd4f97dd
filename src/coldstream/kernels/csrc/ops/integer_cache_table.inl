// The entries of a tier for types of caches of integers, from cache_type::i16 on.
{round_query<two_planes>, store_planes<2>, attend_integers<16, two_planes>, attend_finish_rotated},
    {round_query<one_plane>, store_planes<1>, attend_integers<8, one_plane>, attend_finish_rotated},
    {round_query<one_plane>, store_packed<4>, attend_integers<4, one_plane>, attend_finish_rotated},
    {round_query<one_plane>, store_packed<3>, attend_integers<3, one_plane>, attend_finish_rotated},
