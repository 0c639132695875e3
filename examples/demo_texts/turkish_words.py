"""The words of the Turkish corpus, as entries that `Word.of` reads, and the facts that its questions ask about."""

from __future__ import annotations


def _entries(text: str) -> tuple[str, ...]:
    """The words of a text; `~` stands for a space within an entry."""
    return tuple(word.replace("~", " ") for word in text.split())


PEOPLE = _entries(
    "Ayşe Mehmet Elif Can Zeynep Kerem İpek Işık Çiğdem Ömer Ümit Şule Oğuz Defne Yağmur İsmail Nazlı Ilgaz Eylül "
    "Gülşen Hakan Özge Iraz İdil Tuğrul Şebnem"
)
# Region and number of the province on number plates.
CITIES = {
    "İstanbul": ("Marmara", "34"),
    "Ankara": ("İç Anadolu", "06"),
    "İzmir": ("Ege", "35"),
    "Bursa": ("Marmara", "16"),
    "Konya": ("İç Anadolu", "42"),
    "Trabzon": ("Karadeniz", "61"),
    "Iğdır": ("Doğu Anadolu", "76"),
    "Isparta": ("Akdeniz", "32"),
    "Muğla": ("Ege", "48"),
    "Çanakkale": ("Marmara", "17"),
    "Şırnak": ("Güneydoğu Anadolu", "73"),
    "Gümüşhane": ("Karadeniz", "29"),
    "Kırıkkale": ("İç Anadolu", "71"),
    "Uşak": ("Ege", "64"),
    "Ordu": ("Karadeniz", "52"),
    "Sinop": ("Karadeniz", "57"),
    "Tokat": ("Karadeniz", "60"),
    "Van": ("Doğu Anadolu", "65"),
    "Rize": ("Karadeniz", "53"),
    "Mardin": ("Güneydoğu Anadolu", "47"),
}
PLACES = _entries(
    "ev okul bahçe çarşı orman köy şehir>şehr kütüphane pazar istasyon liman müze mutfak>mutfağ park dağ nehir>nehr "
    "ada köprü sokak>sokağ tarla değirmen kulübe meydan çeşme"
)
THINGS = _entries(
    "kitap>kitab kalem defter çanta elma ekmek>ekmeğ çiçek>çiçeğ mektup>mektub anahtar şemsiye bardak>bardağ taş "
    "balık>balığ şapka gözlük>gözlüğ sepet yumurta ayakkabı top resim>resm lamba bıçak>bıçağ yüzük>yüzüğ fincan halı "
    "ağaç>ağac fındık>fındığ ışık>ışığ çorap>çorab düğme kayık>kayığ"
)
ANIMALS = _entries(
    "kedi köpek>köpeğ kuş at inek>ineğ tavşan kuzu eşek>eşeğ kaplumbağa leylek>leyleğ sincap>sincab tilki horoz "
    "ördek>ördeğ arı karınca balina kirpi baykuş yunus"
)
QUALITIES = _entries(
    "küçük büyük eski yeni kırmızı mavi yeşil sarı beyaz siyah güzel ağır hafif sıcak soğuk uzun kısa mor turuncu "
    "parlak ıslak kuru ilginç sessiz"
)
TRADES = _entries("öğretmen doktor çiftçi balıkçı aşçı marangoz terzi şoför ressam mühendis fırıncı çoban bahçıvan")
VERBS_WITH_OBJECT = _entries(
    "bul al gör sakla taşı getir iste sev ara göster unut temizle düşün seyret>seyred kaybet>kaybed"
)
VERBS_OF_REST = _entries("bekle oyna uyu çalış dinlen gülümse oku yaz şarkı~söyle düşün")
VERBS_OF_ANIMALS = _entries("bekle oyna uyu dinlen uzaklaş saklan atla")
VERBS_OF_MOTION = _entries("git>gid gel koş yürü dön")
WEATHER = (
    "hava çok güneşliydi",
    "ince ince yağmur yağıyordu",
    "dışarıda kar vardı",
    "serin bir rüzgâr esiyordu",
    "gökyüzü masmaviydi",
    "ortalık sisliydi",
    "ılık bir ilkbahar günüydü",
    "şimşekler çakıyordu",
)
MORALS = (
    "Paylaşılan sevinç çoğalır.",
    "Sabırla koruk üzüm olur.",
    "Damlaya damlaya göl olur.",
    "İyilik eden iyilik bulur.",
    "Dost kara günde belli olur.",
    "Acele işe şeytan karışır.",
    "Gülü seven dikenine katlanır.",
    "Işık yanan evde umut vardır.",
)
NUMBERS = _entries(
    "sıfır bir iki üç dört beş altı yedi sekiz dokuz on on~bir on~iki on~üç on~dört on~beş on~altı on~yedi on~sekiz"
)
