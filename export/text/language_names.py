"""The languages of ISO 639-1: their codes of two letters, those of three, and their names in
English (CLDR).

The three-letter codes are those of ISO 639-2, and for a group of languages the code that CLDR uses:
`arb`, Standard Arabic, for `ar`. Macrolanguages of ISO 639-3, such as Pashto, `ps`, have their
individual languages in `MEMBERS`.
"""

from collections.abc import Iterable

TABLE = """
aa aar Afar; ab abk Abkhazian; ae ave Avestan; af afr Afrikaans; ak aka/fat Akan; am amh Amharic;
an arg Aragonese; ar ara/arb Arabic; as asm Assamese; av ava Avaric; ay aym/ayr Aymara;
az aze/azj Azerbaijani; ba bak Bashkir; be bel Belarusian; bg bul Bulgarian; bi bis Bislama;
bm bam Bambara; bn ben Bangla; bo bod/tib Tibetan; br bre Breton; bs bos Bosnian; ca cat Catalan;
ce che Chechen; ch cha Chamorro; co cos Corsican; cr cre/cwd Cree; cs ces/cze Czech;
cu chu Church Slavic; cv chv Chuvash; cy cym/wel Welsh; da dan Danish; de deu/ger German;
dv div Divehi; dz dzo/adp Dzongkha; ee ewe Ewe; el ell/gre Greek; en eng English; eo epo Esperanto;
es spa Spanish; et est/ekk Estonian; eu eus/baq Basque; fa fas/per/pes Persian; ff ful/fuc Fula;
fi fin Finnish; fj fij Fijian; fo fao Faroese; fr fra/fre French; fy fry Western Frisian;
ga gle Irish; gd gla Scottish Gaelic; gl glg Galician; gn grn/gug Guarani; gu guj/prp Gujarati;
gv glv Manx; ha hau Hausa; he heb Hebrew; hi hin Hindi; ho hmo Hiri Motu; hr hrv/scr Croatian;
ht hat Haitian Creole; hu hun Hungarian; hy hye/arm Armenian; hz her Herero; ia ina Interlingua;
id ind Indonesian; ie ile Interlingue; ig ibo Igbo; ii iii Sichuan Yi; ik ipk/esk Inupiaq;
io ido Ido; is isl/ice Icelandic; it ita Italian; iu iku/ike Inuktitut; ja jpn Japanese;
jv jav Javanese; ka kat/geo Georgian; kg kon/kng Kongo; ki kik Kikuyu; kj kua Kuanyama;
kk kaz Kazakh; kl kal Kalaallisut; km khm Khmer; kn kan Kannada; ko kor Korean; kr kau/knc Kanuri;
ks kas Kashmiri; ku kur/kmr Kurdish; kv kom/kpv Komi; kw cor Cornish; ky kir Kyrgyz; la lat Latin;
lb ltz Luxembourgish; lg lug Ganda; li lim Limburgish; ln lin Lingala; lo lao Lao;
lt lit Lithuanian; lu lub Luba-Katanga; lv lav/lvs Latvian; mg mlg/plt Malagasy; mh mah Marshallese;
mi mri/mao Māori; mk mkd/mac Macedonian; ml mal Malayalam; mn mon/drh/khk Mongolian; mr mar Marathi;
ms msa/may/zsm Malay; mt mlt Maltese; my mya/bur Burmese; na nau Nauru; nb nob Norwegian Bokmål;
nd nde North Ndebele; ne nep/npi Nepali; ng ndo Ndonga; nl nld/dut Dutch; nn nno Norwegian Nynorsk;
no nor Norwegian; nr nbl South Ndebele; nv nav Navajo; ny nya Nyanja; oc oci Occitan;
oj oji/ojg Ojibwa; om orm/gaz Oromo; or ori/ory Odia; os oss Ossetic; pa pan Punjabi; pi pli Pali;
pl pol Polish; ps pus/pbu Pashto; pt por Portuguese; qu que/quz Quechua; rm roh Romansh;
rn run Rundi; ro ron/mol/rum Romanian; ru rus Russian; rw kin Kinyarwanda; sa san/cls Sanskrit;
sc srd/src Sardinian; sd snd Sindhi; se sme Northern Sami; sg sag Sango; si sin Sinhala;
sk slk/slo Slovak; sl slv Slovenian; sm smo Samoan; sn sna Shona; so som Somali;
sq sqi/alb/als Albanian; sr srp/scc Serbian; ss ssw Swati; st sot Southern Sotho; su sun Sundanese;
sv swe Swedish; sw swa/swh Swahili; ta tam Tamil; te tel Telugu; tg tgk Tajik; th tha Thai;
ti tir Tigrinya; tk tuk Turkmen; tl tgl Tagalog; tn tsn Tswana; to ton Tongan; tr tur Turkish;
ts tso Tsonga; tt tat Tatar; tw twi Twi; ty tah Tahitian; ug uig Uyghur; uk ukr Ukrainian;
ur urd Urdu; uz uzb/uzn Uzbek; ve ven Venda; vi vie Vietnamese; vo vol Volapük; wa wln Walloon;
wo wol Wolof; xh xho Xhosa; yi yid/ydd Yiddish; yo yor Yoruba; za zha/zyb Zhuang;
zh zho/chi/cmn Chinese; zu zul Zulu
"""
ROWS = [row.strip().split(" ", 2) for row in TABLE.split(";")]
NAMES = {code: name for code, _, name in ROWS}
# two-letter code by three-letter code
TWO_LETTERS = {long: code for code, longs, _ in ROWS for long in longs.split("/")}

MEMBERS = """
ak fat twi; ar aao abh abv acm acq acw acx acy adf aeb aec afb apc apd arb arq ars ary arz auz avl
ayh ayl ayn ayp pga shu ssh; ay ayc ayr; az azb azj; cr crj crk crl crm csw cwd; et ekk vro; fa pes
prs; ff ffm fub fuc fue fuf fuh fui fuq fuv; gn gnw gug gui gun nhd; ik esi esk; iu ike ikt; kg kng
kwy ldi; kr kby knc krt; ku ckb kmr sdh; kv koi kpv; lv ltg lvs; mg bhr bmm bzc msh plt skg tdx tkg
txy xmv xmw; mn khk mvf; ms bjn btj bve bvu coa dup hji ind jak jax kvb kvr kxd lce lcf liw max meo
mfa mfb min mqg msi mui orn ors pel pse tmw urk vkk vkt xmm zlm zmi zsm; ne dty npi; no nno nob; oj
ciw ojb ojc ojg ojs ojw otw; om gax gaz hae orc; or ory spv; ps pbt pbu pst; qu qub qud quf qug quh
quk qul qup qur qus quw qux quy quz qva qvc qve qvh qvi qvj qvl qvm qvn qvo qvp qvs qvw qvz qwa qwc
qwh qws qxa qxc qxh qxl qxn qxo qxp qxr qxt qxu qxw; sa cls vsn; sc sdc sdn src sro; sq aae aat aln
als; sw swc swh; uz uzn uzs; yi ydd yih; za zch zeh zgb zgm zgn zhd zhn zlj zln zlq zqe zyb zyg zyj
zyn zzj; zh cdo cjy cmn cnp cpx csp czh czo gan hak hnm hsn luh lzh mnp nan sjc wuu yue
"""
# The two-letter code of the macrolanguage of each individual language (ISO 639-3).
MACROLANGUAGES = {
    member: code for code, *members in map(str.split, MEMBERS.split(";")) for member in members
}


def shorten_codes(codes: Iterable[str]) -> dict[str, str]:
    """Return {code: two-letter code} of a model's language codes, or the code itself if the
    language has none.

    An individual language gets the code of its macrolanguage if the model has no other language of
    that macrolanguage.
    """
    short = {code: TWO_LETTERS.get(code, code) for code in codes}
    macrolanguages = {code: MACROLANGUAGES.get(code) for code in short}
    members = list(macrolanguages.values())
    for code, macrolanguage in macrolanguages.items():
        is_only = members.count(macrolanguage) == 1 and macrolanguage not in short.values()
        if short[code] not in NAMES and macrolanguage is not None and is_only:
            short[code] = macrolanguage
    return short
