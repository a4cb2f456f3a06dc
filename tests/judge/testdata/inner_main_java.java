class Helper {
  static String text() { return "helped"; }
}
class Runner {
  public static void main(String[] args) { System.out.println(Helper.text()); }
}
